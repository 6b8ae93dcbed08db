// Moves one frame over a TCP connection, in as few system calls as can be, and waits for the other side meanwhile.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "phalanx/wait_policy.hpp"

namespace phalanx {

namespace detail {

constexpr int sleep_ms = 2;  // so long may pass before a thread that wants the channel is seen

// Nothing could be moved: waits until it is time to look again. Anything but `done` ends the transfer here.
inline Outcome wait_for(int fd, short events, Wait& wait, const Bound& bound) noexcept {
    if (bound.aborted->load(std::memory_order_relaxed) != 0) return Outcome::aborted;
    if (look_again(wait, events == POLLIN)) return Outcome::done;
    if (monotonic_ns() >= bound.deadline_ns) return Outcome::timed_out;
    pollfd polled{fd, events, 0};
    ::poll(&polled, 1, sleep_ms);
    return Outcome::done;
}

// A message of several parts costs the kernel more than a copy of so few bytes.
constexpr std::size_t few_bytes = 2048;

inline std::size_t total(const iovec* parts, std::size_t count) noexcept {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += parts[i].iov_len;
    return bytes;
}

inline bool is_for_later(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace detail

// Sends what goes now of these parts, as sendmsg does.
inline ssize_t send_parts(int fd, iovec* parts, std::size_t count) noexcept {
    constexpr int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    if (count == 1) return ::send(fd, parts[0].iov_base, parts[0].iov_len, flags);
    if (detail::total(parts, count) <= detail::few_bytes) {
        std::byte together[detail::few_bytes];
        std::size_t filled = 0;
        for (std::size_t i = 0; i < count; ++i) {
            std::memcpy(together + filled, parts[i].iov_base, parts[i].iov_len);
            filled += parts[i].iov_len;
        }
        return ::send(fd, together, filled, flags);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    return ::sendmsg(fd, &message, flags);
}

// Receives what is there now into these parts, as recvmsg does.
inline ssize_t receive_parts(int fd, iovec* parts, std::size_t count) noexcept {
    if (count == 1) return ::recv(fd, parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
    const std::size_t wanted = detail::total(parts, count);
    if (wanted <= detail::few_bytes) {
        std::byte together[detail::few_bytes];
        const ssize_t got = ::recv(fd, together, wanted, MSG_DONTWAIT);
        std::size_t used = 0;
        for (std::size_t i = 0; i < count && got > 0 && used < static_cast<std::size_t>(got); ++i) {
            const std::size_t length = std::min(parts[i].iov_len, static_cast<std::size_t>(got) - used);
            std::memcpy(parts[i].iov_base, together + used, length);
            used += length;
        }
        return got;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    return ::recvmsg(fd, &message, MSG_DONTWAIT);
}

// One frame that is sent: its head and its payload.
struct StreamFrame {
    const std::uint8_t* head;
    std::size_t head_size;
    const std::byte* payload;
    std::size_t size;

    std::size_t whole() const noexcept { return head_size + size; }
};

// Writes as much as goes now, and of the payload at most so many bytes. False if the connection has ended.
inline bool write_some(int fd, const StreamFrame& frame, std::size_t& sent, std::size_t most = SIZE_MAX) noexcept {
    iovec parts[2];
    std::size_t count = 0;
    if (sent < frame.head_size) parts[count++] = {const_cast<std::uint8_t*>(frame.head) + sent, frame.head_size - sent};
    const std::size_t from = sent > frame.head_size ? sent - frame.head_size : 0;
    if (from < frame.size) parts[count++] = {const_cast<std::byte*>(frame.payload) + from, std::min(frame.size - from, most)};
    const ssize_t now = send_parts(fd, parts, count);
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
