// How long the main thread of this process was ready to run and had no processor, as Linux counts it. What a crowded machine
// does to a rank is told apart by it from what the rank's own program does. Other threads do not count: they compete with the
// main one, and with each other, for what the process gets.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace phalanx {

// Looking costs some microseconds, so only what took long is looked at. The file is opened each time: a descriptor would stay
// as long as the slate, and a forked child would read its parent's.
class RunDelay {
public:
    static constexpr std::int64_t long_ns = 1'000'000;

    // An operation begins: the delay since the last one has ended, in microseconds; 0 where the system does not count it.
    std::uint32_t begin(std::int64_t now) noexcept {
        const std::int64_t gap = now - ended_ns_;
        if (gap < long_ns || ended_ns_ == 0) return 0;
        const std::int64_t delay = since_last_look();
        return static_cast<std::uint32_t>((delay < gap ? delay : gap) / 1000);
    }

    void end(std::int64_t began, std::int64_t now) noexcept {
        if (now - began >= long_ns) since_last_look();
        ended_ns_ = now;
    }

private:
    std::int64_t since_last_look() noexcept {
        const int fd = ::open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
        if (fd < 0) return 0;
        char text[64];
        const ssize_t size = ::read(fd, text, sizeof text - 1);
        ::close(fd);
        if (size <= 0) return 0;
        text[size] = '\0';
        char* rest = nullptr;
        std::strtoll(text, &rest, 10);  // the time on a processor comes first
        const std::int64_t before = total_;
        total_ = std::strtoll(rest, nullptr, 10);
        return total_ - before;
    }

    std::int64_t total_ = 0;
    std::int64_t ended_ns_ = 0;
};

}  // namespace phalanx
