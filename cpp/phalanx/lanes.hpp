// Long payloads of remote calls over several connections at once: one thread for each on either side.
//
// One connection keeps one core busy on each side at most, and on one machine the two wait for each other much of the time.
// The frame itself goes over the first connection as ever; its payload is cut into blocks, and the lanes get one after
// another in turn, so the receiver can take the payload in order and piece by piece. A lane has no bytes besides those.
//
// On a machine that has one core for each lane, both ends of a lane are kept on one core. They take turns there: the receiver
// finds the bytes in the cache, and neither end has to wake up a core that sleeps. Left alone, the kernel puts the two ends on
// one core in some payloads and on two in others, which take up to twice as long.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "phalanx/loopback.hpp"
#include "phalanx/spreading.hpp"

namespace phalanx {

constexpr int lane_closed = -1;  // by the other side; other values are error numbers of the operating system

class Lanes {
public:
    // The sockets are this object's from now on.
    explicit Lanes(const std::vector<int>& sockets)
        : is_local_(!sockets.empty() && std::all_of(sockets.begin(), sockets.end(), joins_one_machine)) {
        for (const int socket : sockets) {
            lanes_.push_back(std::make_unique<Lane>(socket));
            block_for(socket, SO_SNDTIMEO, send_ms);
            block_for(socket, SO_RCVTIMEO, receive_ms);
            const int flags = ::fcntl(socket, F_GETFL);
            if (flags >= 0) ::fcntl(socket, F_SETFL, flags & ~O_NONBLOCK);
        }
        if (find_cores().of.empty()) return;
        for (const int socket : sockets) ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &cached, sizeof cached);
    }

    Lanes(const Lanes&) = delete;
    Lanes& operator=(const Lanes&) = delete;
    ~Lanes() {
        for (auto& lane : lanes_) {
            if (lane->rest_sender.joinable()) {
                ::shutdown(lane->socket, SHUT_RDWR);
                lane->rest_sender.join();
            }
            ::close(lane->socket);
        }
    }

    // In a forked child: the threads are the parent's.
    void abandon() noexcept {
        for (auto& lane : lanes_)
            if (lane->rest_sender.joinable()) lane->rest_sender.detach();
    }

    // Ends all of them; whoever waits on one is woken. From any thread.
    void sever() noexcept {
        for (auto& lane : lanes_) ::shutdown(lane->socket, SHUT_RDWR);
    }

    enum class State { ready, busy, ended };

    // Whether a payload can be sent. Not before all of the one before is gone.
    State state() {
        std::vector<pollfd> polled;
        for (auto& lane : lanes_) {
            if (lane->sends_rest.load(std::memory_order_acquire)) return State::busy;
            if (lane->rest_sender.joinable()) lane->rest_sender.join();
            polled.push_back({lane->socket, POLLRDHUP, 0});
        }
        return ::poll(polled.data(), polled.size(), 0) == 0 ? State::ready : State::ended;
    }

    // Sends the payload that these parts are. What the other side does not take for a while is copied, and sent by threads
    // that stay for it: the memory is the caller's again when this returns. 0, or what has ended a lane.
    int send(std::span<const iovec> parts, std::size_t payload) {
        const Payload sent(parts, payload);
        std::atomic<int> error{0};
        together([&](std::size_t number) {
            const int ended = send_on(number, sent);
            if (ended != 0) error.store(ended, std::memory_order_relaxed);
        });
        return error.load(std::memory_order_relaxed);
    }

    // A payload of so many bytes comes.
    void begin(std::size_t payload) noexcept {
        coming_ = payload;
        done_ = end_ = 0;
        idle_ = false;
        for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i]->at = i * block;
    }

    bool coming() const noexcept { return done_ < coming_; }

    // Fills memory with what follows of it, and returns how many bytes came. Waits for them, but not for long. Bytes behind
    // those may lie in the memory already: it is to be the same next time.
    std::size_t fill(char* to, std::size_t size, int patience_ms, int& ended) {
        if (idle_ && !sleep(patience_ms)) return 0;
        const std::size_t end = end_ = done_ + std::min(size, coming_ - done_);
        std::atomic<int> error{0};
        together([&](std::size_t number) {
            const int found = receive_on(number, to, end);
            if (found != 0) error.store(found, std::memory_order_relaxed);
        });
        ended = error.load(std::memory_order_relaxed);
        std::size_t first = end;
        for (const auto& lane : lanes_) first = std::min(first, lane->at);
        const std::size_t count = first - done_;
        done_ = first;
        idle_ = count == 0;
        return count;
    }

private:
    static constexpr std::size_t block = 512 << 10;
    static constexpr std::size_t most_pieces = 32;  // of memory for one call
    static constexpr int cached = 256 << 10;  // bytes under way where both ends share a core: so few stay in its own cache
    static constexpr int send_ms = 20;    // without progress, after which a sender gets its memory back
    static constexpr int receive_ms = 4;  // so long may pass before a reader is seen that should do something else

    struct Lane {
        explicit Lane(int fd) noexcept : socket(fd) {}

        int socket;
        std::size_t at = 0;  // of the receiver: where the next byte of this lane belongs in the payload
        std::vector<char> rest;  // of the sender: what the other side did not take in time
        std::atomic<bool> sends_rest{false};
        std::thread rest_sender;
    };

    // The memory of a payload, by place.
    class Payload {
    public:
        Payload(std::span<const iovec> parts, std::size_t bytes) : parts_(parts), bytes_(bytes) {
            std::size_t start = 0;
            for (const iovec& part : parts_) {
                starts_.push_back(start);
                start += part.iov_len;
            }
        }

        std::size_t bytes() const noexcept { return bytes_; }

        // Pieces of memory from `at` to `end`, as many as fit.
        std::size_t pieces(std::size_t at, std::size_t end, std::span<iovec> found) const noexcept {
            const auto behind = std::upper_bound(starts_.begin(), starts_.end(), at);
            std::size_t part = static_cast<std::size_t>(behind - starts_.begin()) - 1, count = 0;
            for (; at < end && count < found.size(); ++part) {
                const std::size_t skipped = at - starts_[part];
                const std::size_t length = std::min(parts_[part].iov_len - skipped, end - at);
                if (length == 0) continue;
                found[count++] = {static_cast<char*>(parts_[part].iov_base) + skipped, length};
                at += length;
            }
            return count;
        }

    private:
        std::span<const iovec> parts_;
        std::size_t bytes_;
        std::vector<std::size_t> starts_;
    };

    static void block_for(int socket, int option, int ms) noexcept {
        const timeval span{ms / 1000, (ms % 1000) * 1000};
        ::setsockopt(socket, SOL_SOCKET, option, &span, sizeof span);
    }

    static bool is_for_later(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

    // The place of a lane's byte that comes so many bytes after the one at `at`: its blocks are not neighbours.
    std::size_t after(std::size_t at, std::size_t bytes) const noexcept {
        const std::size_t in_block = at % block + bytes;
        return at - at % block + in_block / block * lanes_.size() * block + in_block % block;
    }

    // The core of each lane, by its number; none if the lanes do not fill the cores of this process, or lead elsewhere.
    struct LaneCores {
        cpu_set_t allowed;
        std::vector<int> of;
    };
    LaneCores find_cores() const {
        LaneCores cores;
        if (!is_local_ || sched_getaffinity(0, sizeof cores.allowed, &cores.allowed) != 0) return cores;
        if (CPU_COUNT(&cores.allowed) != static_cast<int>(lanes_.size())) return cores;
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &cores.allowed)) cores.of.push_back(core);
        return cores;
    }

    // Does something for each lane at once: this thread for one, and threads that are made for it for the others.
    template <class Work>
    void together(const Work& work) {
        const LaneCores cores = find_cores();
        const auto here = std::find(cores.of.begin(), cores.of.end(), sched_getcpu());
        const std::size_t own = here == cores.of.end() ? 0 : static_cast<std::size_t>(here - cores.of.begin());
        const auto run = [&](std::size_t number) {
            std::optional<StayOn> stay;
            if (!cores.of.empty()) stay.emplace(cores.of[number], cores.allowed);
            work(number);
        };
        std::vector<std::thread> team;
        std::size_t given = 1;
        const auto number = [&](std::size_t i) { return (own + i) % lanes_.size(); };
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals go to the program's own threads
        try {
            team.reserve(lanes_.size());
            for (; given < lanes_.size(); ++given) team.emplace_back(run, number(given));
        } catch (const std::exception&) {
            // There are no more threads to be had: this one does the rest.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        run(own);
        for (; given < lanes_.size(); ++given) run(number(given));
        for (std::thread& thread : team) thread.join();
    }

    int send_on(std::size_t number, const Payload& payload) {
        Lane& lane = *lanes_[number];
        for (std::size_t at = number * block; at < payload.bytes();) {
            iovec pieces[most_pieces];
            msghdr message{};
            message.msg_iov = pieces;
            message.msg_iovlen = pieces_from(at, payload, pieces);
            const ssize_t count = ::sendmsg(lane.socket, &message, MSG_NOSIGNAL);
            if (count >= 0)
                at = after(at, static_cast<std::size_t>(count));
            else if (errno == EAGAIN || errno == EWOULDBLOCK)
                return send_later(lane, payload, at);
            else if (errno != EINTR)
                return errno;
        }
        return 0;
    }

    // Memory of the lane to which `at` belongs, from there on, as much as fits. All in one call: each one that ends has the
    // kernel send what it has, and wake the receiver for it.
    std::size_t pieces_from(std::size_t at, const Payload& payload, std::span<iovec> found) const noexcept {
        std::size_t count = 0;
        while (at < payload.bytes() && count < found.size()) {
            const std::size_t end = std::min((at / block + 1) * block, payload.bytes());
            const std::size_t more = payload.pieces(at, end, found.subspan(count));
            for (const iovec& piece : found.subspan(count, more)) at = after(at, piece.iov_len);
            count += more;
        }
        return count;
    }

    // Copies what this lane has not sent, from `at` on.
    int send_later(Lane& lane, const Payload& payload, std::size_t at) {
        try {
            lane.rest.clear();
            while (at < payload.bytes()) {
                iovec piece;
                pieces_from(at, payload, {&piece, 1});
                const char* from = static_cast<const char*>(piece.iov_base);
                lane.rest.insert(lane.rest.end(), from, from + piece.iov_len);
                at = after(at, piece.iov_len);
            }
            lane.sends_rest.store(true, std::memory_order_relaxed);
            sigset_t all, before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            lane.rest_sender = std::thread(send_rest, std::ref(lane));
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            return 0;
        } catch (const std::exception&) {  // no memory, or no thread
            lane.sends_rest.store(false, std::memory_order_relaxed);
            ::shutdown(lane.socket, SHUT_RDWR);  // the payload is cut short, and so the other side must be told
            return ENOMEM;
        }
    }

    static void send_rest(Lane& lane) noexcept {
        for (std::size_t sent = 0; sent < lane.rest.size();) {
            const ssize_t count = ::send(lane.socket, lane.rest.data() + sent, lane.rest.size() - sent, MSG_NOSIGNAL);
            if (count < 0 && !is_for_later(errno)) break;  // the next payload will find that it has ended
            if (count > 0) sent += static_cast<std::size_t>(count);
        }
        lane.rest = {};
        lane.sends_rest.store(false, std::memory_order_release);
    }

    // Receives what this lane has before `end` of the payload. The memory is that from `done_` on.
    int receive_on(std::size_t number, char* memory, std::size_t end) {
        Lane& lane = *lanes_[number];
        while (lane.at < end) {
            iovec pieces[most_pieces];
            msghdr message{};
            message.msg_iov = pieces;
            for (std::size_t at = lane.at; at < end && message.msg_iovlen < most_pieces;) {
                const std::size_t length = std::min((at / block + 1) * block, end) - at;
                pieces[message.msg_iovlen++] = {memory + (at - done_), length};
                at = after(at, length);
            }
            const ssize_t count = ::recvmsg(lane.socket, &message, 0);
            if (count == 0) return lane_closed;
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return is_for_later(errno) ? 0 : errno;
            lane.at = after(lane.at, static_cast<std::size_t>(count));
        }
        return 0;
    }

    // Nothing came last time: before threads are made again, something has to.
    bool sleep(int patience_ms) {
        std::vector<pollfd> polled;
        for (const auto& lane : lanes_)
            if (lane->at < end_) polled.push_back({lane->socket, POLLIN, 0});
        return ::poll(polled.data(), polled.size(), patience_ms) != 0;
    }

    std::vector<std::unique_ptr<Lane>> lanes_;
    bool is_local_;
    // Of the receiver.
    std::size_t coming_ = 0;  // bytes of the payload
    std::size_t done_ = 0;    // of which all before this have come
    std::size_t end_ = 0;     // of the part that was asked for last
    bool idle_ = false;
};

}  // namespace phalanx
