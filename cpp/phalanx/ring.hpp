// A ring of bytes in shared memory: one process writes, another reads, nobody locks.
//
// Each side counts the bytes that it has ever moved and publishes the count after the bytes themselves, or a few bytes together
// with it. What it reads of the other side's count is checked before use: a peer that writes nonsense there is told from, and
// cannot lead us outside the ring. A side that finds nothing to do sleeps either on its bell (a futex) or in poll() on the
// socket that belongs to the channel; whoever moves bytes wakes it in the way that it asked for.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "phalanx/long_copy.hpp"
#include "phalanx/peer_memory.hpp"
#include "phalanx/spreading.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx {

enum class Presence : std::uint32_t { here, closed, severed };

// How one side of a ring is woken, and whether it is still there.
struct alignas(64) RingSide {
    Bell bell;
    Shared<std::uint32_t> polls{0};     // it waits in poll() and wants a byte on the socket
    Shared<std::uint32_t> presence{0};  // a Presence
};

// What one side has moved, and on which core it was then (0: unknown, else one more).
struct RingCount {
    Shared<std::uint64_t> bytes{0};
    Shared<std::uint16_t> core{0};
    Shared<std::uint16_t> beside{0};      // of the writer: so many of its last bytes lie beside its count,
    Shared<std::uint32_t> beside_end{0};  // which had these low bits then; 0: none do
};

// How much the writer has written, and the last bytes of it if it has shown few at once: who waits for them gets them together
// with the count, and does not have to fetch one line of the cache after the other. When the writer goes on, they lie in the
// ring, too.
class alignas(128) RingFront {
public:
#if defined(__x86_64__)
    static constexpr std::size_t most_beside = 112;  // to the end of the second line, which comes along with the first
#else
    static constexpr std::size_t most_beside = 48;  // to the end of the line
#endif
    using Words = std::array<std::uint64_t, most_beside / sizeof(std::uint64_t)>;

    RingCount count;

    // Before the count is stored that ends with these bytes. Only if its low bits are not 0.
    void set(const Words& words, std::size_t bytes, std::uint64_t end) noexcept {
        clear();
        std::atomic_thread_fence(std::memory_order_release);  // who finds a new word finds the old ones gone
        for (std::size_t i = 0; i * sizeof(words[0]) < bytes; ++i) words_[i].store(words[i], std::memory_order_relaxed);
        count.beside.store(static_cast<std::uint16_t>(bytes), std::memory_order_relaxed);
        count.beside_end.store(static_cast<std::uint32_t>(end), std::memory_order_relaxed);
    }
    void clear() noexcept { count.beside_end.store(0, std::memory_order_release); }

    // How many of the bytes that end at this count are here, and which. If none are, all lie in the ring.
    std::size_t get(Words& words, std::uint64_t end) const noexcept {
        const auto low_bits = static_cast<std::uint32_t>(end);
        const auto stands = [&] { return count.beside_end.load(std::memory_order_acquire) == low_bits; };
        if (low_bits == 0 || !stands()) return 0;
        const std::size_t bytes = std::min<std::size_t>(count.beside.load(std::memory_order_relaxed), most_beside);
        for (std::size_t i = 0; i * sizeof(words[0]) < bytes; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        return stands() ? bytes : 0;
    }

private:
    std::array<Shared<std::uint64_t>, std::tuple_size_v<Words>> words_{};
};
static_assert(sizeof(RingCount) + RingFront::most_beside <= sizeof(RingFront) && sizeof(RingFront) == 128);

// What comes before the bytes of a payload, or in their place (lending.hpp).
struct PayloadPart {
    std::uint32_t lent;    // 1: they lie at `address`; 0: they follow
    std::uint32_t number;  // of the loan on this ring
    std::uint64_t bytes;
    std::uint64_t address;
    std::uint64_t proof_at;
    Proof proof;
};
static_assert(sizeof(PayloadPart) == 48);

// A loan in place of bytes of the ring, which would come at this position (message_loans.hpp). One that is read while another is
// written may be a mixture of both: then the first is over, and whoever acts on it finds that out.
class LoanOffer {
public:
    void set(const PayloadPart& part, std::uint64_t position) noexcept {
        const auto words = std::bit_cast<std::array<std::uint64_t, 6>>(part);
        for (std::size_t i = 1; i < words.size(); ++i) words_[i].store(words[i], std::memory_order_relaxed);
        position_.store(position, std::memory_order_relaxed);
        words_[0].store(words[0], std::memory_order_release);  // the number of the loan
    }
    std::pair<PayloadPart, std::uint64_t> get() const noexcept {
        std::array<std::uint64_t, 6> words;
        for (std::size_t i = 0; i < words.size(); ++i) words[i] = words_[i].load(std::memory_order_acquire);
        return {std::bit_cast<PayloadPart>(words), position_.load(std::memory_order_relaxed)};
    }

private:
    std::array<Shared<std::uint64_t>, 6> words_{};
    Shared<std::uint64_t> position_{0};
};

// The first page of the memory; the bytes of the ring follow.
struct RingControl {
    std::uint8_t nonce[16]{};
    std::uint64_t size = 0;
    Shared<std::uint32_t> accepted{0};
    RingFront written;
    alignas(64) RingCount read;
    RingSide reader;
    RingSide writer;
    alignas(64) Shared<std::uint64_t> loan{0};  // what the reader has taken of the writer's memory; see lending.hpp
    LoanOffer offer;
};

constexpr std::size_t ring_control_bytes = 4096;
static_assert(sizeof(RingControl) <= ring_control_bytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// What the two halves have in common. `size` is a power of two.
class RingHalf {
public:
    RingHalf(void* memory, std::size_t size, int socket, RingSide RingControl::*mine, RingSide RingControl::*other,
             RingCount& moved, const RingCount& others)
        : control_(control_of(memory)),
          data_(static_cast<std::byte*>(memory) + ring_control_bytes),
          size_(size),
          socket_(socket),
          mine_(control_.*mine),
          other_(control_.*other),
          moved_(moved),
          others_(others) {}

    // Bytes of a message from which its copies ask ahead; see long_copy.hpp.
    std::size_t ahead_from = SIZE_MAX;
    CopyBy copies(std::size_t message) const noexcept { return message >= ahead_from ? CopyBy::ahead : CopyBy::plain; }

    RingControl& control() noexcept { return control_; }
    Bell& bell() noexcept { return mine_.bell; }

    bool other_closed() const noexcept { return other_.presence.load(std::memory_order_acquire) != 0; }
    bool severed() const noexcept {
        return other_.presence.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Presence::severed);
    }
    // The other side has written a count that cannot be.
    bool broken() const noexcept { return broken_; }
    // What was read and what was written, as this side found it when it took the ring for broken.
    std::pair<std::uint64_t, std::uint64_t> broken_counts() const noexcept { return {broken_read_, broken_written_}; }

    // Whether the other side was last seen on the core that this thread runs on.
    bool shares_core() const noexcept { return others_.core.load(std::memory_order_relaxed) == this_core(); }

    // Before a wait: two that share a core while others are free would take turns there.
    void part() noexcept {
        if (!shares_core()) return;
        parting_.look();
        show_core();
    }

    // After a sleep in poll(), which the other side has ended.
    void part_woken() noexcept {
        if (!shares_core()) return;
        parting_.woken();
        show_core();
    }

    // Says that this side will sleep in poll(). Look for work once more afterwards, and only then sleep.
    void ask_for_byte() noexcept { mine_.polls.store(1, std::memory_order_seq_cst); }
    void ask_for_no_byte() noexcept {
        if (mine_.polls.load(std::memory_order_relaxed) != 0) mine_.polls.store(0, std::memory_order_relaxed);
    }

    // Whoever waits in poll() is woken by the end of the connection, which follows.
    void leave() noexcept {
        mine_.presence.store(static_cast<std::uint32_t>(Presence::closed), std::memory_order_release);
        other_.bell.announce();
    }

    // As a network that fails does: neither side gets another byte.
    void sever() noexcept {
        for (RingSide* side : {&mine_, &other_}) {
            side->presence.store(static_cast<std::uint32_t>(Presence::severed), std::memory_order_release);
            side->bell.wake();
        }
    }

    void wake_other() noexcept {
        other_.bell.announce();  // has the fence that the next line needs as well
        if (other_.polls.load(std::memory_order_relaxed) != 0 && other_.polls.exchange(0) != 0) {
            // A socket that takes no more is full of such bytes, and wakes the other side anyway.
            [[maybe_unused]] const auto sent = ::send(socket_, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        }
    }

protected:
    static RingControl& control_of(void* memory) noexcept { return *static_cast<RingControl*>(memory); }

    std::byte* at(std::uint64_t position) const noexcept { return data_ + (position & (size_ - 1)); }
    std::size_t until_wrap(std::uint64_t position) const noexcept { return size_ - (position & (size_ - 1)); }

    RingControl& control_;
    std::byte* data_;
    std::size_t size_;
    int socket_;
    RingSide& mine_;
    RingSide& other_;
    RingCount& moved_;
    const RingCount& others_;
    Parting parting_;
    std::uint64_t written_ = 0;  // what this side knows of both counts
    std::uint64_t read_ = 0;
    bool broken_ = false;
    std::uint64_t broken_read_ = 0;
    std::uint64_t broken_written_ = 0;

    void show_core() noexcept { moved_.core.store(this_core(), std::memory_order_relaxed); }
    static std::uint16_t this_core() noexcept { return static_cast<std::uint16_t>(sched_getcpu() + 1); }

    void show(std::uint64_t bytes) noexcept {
        show_core();
        moved_.bytes.store(bytes, std::memory_order_release);
        wake_other();
    }

    void refuse_counts(std::uint64_t read, std::uint64_t written) noexcept {
        if (broken_) return;
        broken_ = true;
        broken_read_ = read;
        broken_written_ = written;
    }
};

class RingWriter : public RingHalf {
public:
    RingWriter(void* memory, std::size_t size, int socket)
        : RingHalf(memory, size, socket, &RingControl::writer, &RingControl::reader, control_of(memory).written.count,
                   control_of(memory).read) {}

    // Bytes that fit now. The other side's count is looked up only if fewer than `wanted` are known to fit.
    std::size_t room(std::size_t wanted) noexcept {
        if (size_ - (written_ - read_) < wanted) {
            const std::uint64_t seen = control_.read.bytes.load(std::memory_order_acquire);
            if (seen - read_ > written_ - read_) refuse_counts(seen, written_);  // it goes back, or was never written
            if (!broken_) read_ = seen;
        }
        return broken_ ? 0 : size_ - (written_ - read_);
    }

    // At most `room` bytes. Seen by the reader after `publish`.
    void put(const void* from, std::size_t count, CopyBy by = CopyBy::plain) noexcept {
        if (is_staged() && count <= RingFront::most_beside && staged_ <= RingFront::most_beside - count) {
            std::memcpy(reinterpret_cast<std::byte*>(staging_.data()) + staged_, from, count);
            staged_ += count;
        } else {
            copy_staged();
            copy_in(written_, from, count, by);
        }
        written_ += count;
    }

    void publish() noexcept {
        const bool beside = staged_ != 0 && is_staged() && static_cast<std::uint32_t>(written_) != 0;
        if (beside) {
            control_.written.set(staging_, staged_, written_);
        } else {
            copy_staged();
            if (was_beside_) control_.written.clear();
        }
        was_beside_ = beside;
        show(written_);
        // After the reader has seen them: it does not wait for this.
        copy_staged();
        shown_ = written_;
    }

    // Where this side is: bytes that it has written.
    std::uint64_t position() const noexcept { return written_; }

private:
    // Whether all that was written since it was shown last is staged.
    bool is_staged() const noexcept { return staged_ == written_ - shown_; }

    void copy_in(std::uint64_t position, const void* from, std::size_t count, CopyBy by = CopyBy::plain) noexcept {
        const auto* const bytes = static_cast<const std::byte*>(from);
        const std::size_t first = std::min(count, until_wrap(position));
        copy_by(by, at(position), bytes, first);
        copy_by(by, data_, bytes + first, count - first);
    }

    void copy_staged() noexcept {
        if (staged_ == 0) return;
        copy_in(shown_, staging_.data(), staged_);
        staged_ = 0;
    }

    RingFront::Words staging_;
    std::size_t staged_ = 0;    // bytes
    std::uint64_t shown_ = 0;   // what the reader has been shown
    bool was_beside_ = false;   // the last ones lie beside the count
};

class RingReader : public RingHalf {
public:
    RingReader(void* memory, std::size_t size, int socket)
        : RingHalf(memory, size, socket, &RingControl::reader, &RingControl::writer, control_of(memory).read,
                   control_of(memory).written.count) {}

    // Bytes that are there. The other side's count is looked up only if fewer than `wanted` are known.
    std::size_t available(std::size_t wanted) noexcept {
        if (written_ - read_ < wanted) {
            const std::uint64_t seen = control_.written.count.bytes.load(std::memory_order_acquire);
            if (seen - read_ > size_ || seen - read_ < written_ - read_) refuse_counts(read_, seen);
            if (!broken_ && seen != written_) {
                beside_ = control_.written.get(last_, seen);
                written_ = seen;
            }
        }
        return broken_ ? 0 : written_ - read_;
    }

    // Whether there is something to read, without a change to this side: another thread may be reading just now.
    bool has_bytes() const noexcept {
        return control_.written.count.bytes.load(std::memory_order_acquire) != control_.read.bytes.load(std::memory_order_relaxed);
    }

    // Of the bytes that are available: `count` of them from `offset` on, which stay.
    void peek(void* to, std::size_t count, std::size_t offset = 0, CopyBy by = CopyBy::plain) const noexcept {
        each_piece(read_ + offset, count, [&](const std::byte* piece, std::size_t done, std::size_t size) {
            copy_by(by, static_cast<std::byte*>(to) + done, piece, size);
        });
    }

    bool begins_with(const void* bytes, std::size_t count) const noexcept {
        bool same = true;
        each_piece(read_, count, [&](const std::byte* piece, std::size_t done, std::size_t size) {
            same = same && std::memcmp(piece, static_cast<const std::byte*>(bytes) + done, size) == 0;
        });
        return same;
    }

    // Where this side is: bytes that it has read.
    std::uint64_t position() const noexcept { return read_; }
    // The same as the writer sees it, for threads that only look.
    std::uint64_t shown_position() const noexcept { return control_.read.bytes.load(std::memory_order_relaxed); }

    // Forgets bytes that are available. Their place is the writer's again after `publish`.
    void skip(std::size_t count) noexcept { read_ += count; }

    void publish() noexcept { show(read_); }

private:
    // `use(piece, done, size)` for each piece of memory in which these bytes lie: in the ring, at its beginning, beside the count.
    template <class Use>
    void each_piece(std::uint64_t from, std::size_t count, Use use) const noexcept {
        const std::uint64_t last = written_ - beside_;
        const std::size_t in_ring = from < last ? std::min<std::size_t>(count, last - from) : 0;
        const std::size_t first = std::min(in_ring, until_wrap(from));
        if (first > 0) use(at(from), 0, first);
        if (first < in_ring) use(data_, first, in_ring - first);
        if (in_ring < count) use(reinterpret_cast<const std::byte*>(last_.data()) + (from + in_ring - last), in_ring, count - in_ring);
    }

    RingFront::Words last_{};
    std::size_t beside_ = 0;  // so many bytes of it are the last ones of what is known to be written
};

}  // namespace phalanx
