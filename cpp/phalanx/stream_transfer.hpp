// Moves one frame over a TCP connection, in as few system calls as can be, and waits for the other side meanwhile.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "phalanx/wait_policy.hpp"

namespace phalanx {

namespace detail {

constexpr int sleep_ms = 2;  // so long may pass before a thread that wants the channel is seen

// Nothing could be moved: waits until it is time to look again. Anything but `done` ends the transfer here.
inline Outcome wait_for(int fd, short events, Wait& wait, const Bound& bound) noexcept {
    if (bound.aborted->load(std::memory_order_relaxed) != 0) return Outcome::aborted;
    if (look_again(wait)) return Outcome::done;
    if (monotonic_ns() >= bound.deadline_ns) return Outcome::timed_out;
    pollfd polled{fd, events, 0};
    ::poll(&polled, 1, sleep_ms);
    return Outcome::done;
}

inline bool is_for_later(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace detail

// One frame that is sent: its head and its payload.
struct StreamFrame {
    const std::uint8_t* head;
    std::size_t head_size;
    const std::byte* payload;
    std::size_t size;

    std::size_t whole() const noexcept { return head_size + size; }
};

// Writes as much as goes now. False if the connection has ended.
inline bool write_some(int fd, const StreamFrame& frame, std::size_t& sent) noexcept {
    iovec parts[2];
    std::size_t count = 0;
    if (sent < frame.head_size) parts[count++] = {const_cast<std::uint8_t*>(frame.head) + sent, frame.head_size - sent};
    const std::size_t from = sent > frame.head_size ? sent - frame.head_size : 0;
    if (from < frame.size) parts[count++] = {const_cast<std::byte*>(frame.payload) + from, frame.size - from};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t now = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (now < 0) return detail::is_for_later(errno);
    sent += static_cast<std::size_t>(now);
    return true;
}

// Writes on from `sent`, which counts the head as well.
inline Outcome write_on(int fd, const StreamFrame& frame, std::size_t& sent, Wait& wait, const Bound& bound) noexcept {
    while (sent < frame.whole()) {
        const std::size_t before = sent;
        if (!write_some(fd, frame, sent)) return Outcome::left;
        if (sent > before) {
            if (wait.waits()) wait.end(monotonic_ns());
            if (bound.aborted->load(std::memory_order_relaxed) != 0) break;
            continue;
        }
        const Outcome outcome = detail::wait_for(fd, POLLOUT, wait, bound);
        if (outcome != Outcome::done) return outcome;
    }
    return sent == frame.whole() ? Outcome::done : Outcome::aborted;
}

// Reads as much as is there now. False if the connection has ended.
inline bool read_some(int fd, std::byte* to, std::size_t most, std::size_t& got) noexcept {
    const ssize_t now = ::recv(fd, to + got, most - got, MSG_DONTWAIT);
    if (now < 0) return detail::is_for_later(errno);
    got += static_cast<std::size_t>(now);
    return now > 0;
}

// Reads on from `got` until there are `enough`, and at most `most`.
inline Outcome read_on(int fd, std::byte* to, std::size_t enough, std::size_t most, std::size_t& got, Wait& wait,
                       const Bound& bound) noexcept {
    while (got < enough) {
        const std::size_t before = got;
        if (!read_some(fd, to, most, got)) return Outcome::left;
        if (got > before) {
            if (wait.waits()) wait.end(monotonic_ns());
            if (bound.aborted->load(std::memory_order_relaxed) != 0) break;
            continue;
        }
        const Outcome outcome = detail::wait_for(fd, POLLIN, wait, bound);
        if (outcome != Outcome::done) return outcome;
    }
    return got >= enough ? Outcome::done : Outcome::aborted;
}

}  // namespace phalanx
