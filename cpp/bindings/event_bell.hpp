// What wakes a thread that sleeps until a descriptor has something to read.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

namespace phalanx {

// Wakes a thread that sleeps in poll(). All of it with the GIL.
class EventBell {
public:
    EventBell() = default;
    ~EventBell() { close(); }
    EventBell(const EventBell&) = delete;
    EventBell& operator=(const EventBell&) = delete;

    void close() noexcept {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

    int fd() const noexcept { return fd_; }  // below 0: there is none to be had

    void ring() noexcept {
        const std::uint64_t one = 1;
        if (heard_ && !rung_ && fd_ >= 0) rung_ = ::write(fd_, &one, sizeof one) == sizeof one;
    }

    // As long as this exists, somebody may sleep.
    class Heard {
    public:
        explicit Heard(EventBell& bell) noexcept : bell_(bell) {
            if (bell_.fd_ < 0) bell_.fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
            bell_.heard_ = true;
        }
        ~Heard() {
            bell_.heard_ = false;
            std::uint64_t count = 0;
            if (bell_.rung_) bell_.rung_ = ::read(bell_.fd_, &count, sizeof count) < 0 && errno == EINTR;
        }
        Heard(const Heard&) = delete;
        Heard& operator=(const Heard&) = delete;

    private:
        EventBell& bell_;
    };

private:
    int fd_ = -1;
    bool heard_ = false;
    bool rung_ = false;
};

}  // namespace phalanx
