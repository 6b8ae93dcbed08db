// A message out and a message in at the same time, through two rings, in one thread: neither waits for the other to be through,
// so two ranks can exchange arrays of any length.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "mapped_ring.hpp"
#include "message_line.hpp"

namespace phalanx {

// The way out. `step` moves what there is room for, or sees how far the other side has read what is lent to it.
class Outgoing {
public:
    Outgoing(RingOut& mapped, const MessageCalls::Message& message) noexcept
        : loans_(mapped.loans),
          ring_(*mapped.half()),
          head_(message.head),
          data_(static_cast<const std::byte*>(message.array.data)),
          size_(message.array.bytes) {}
    ~Outgoing() { take_back(); }
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;

    bool begun() const noexcept { return begun_; }
    bool ended() const noexcept { return begun_ && done_ == size_; }
    std::size_t done() const noexcept { return done_; }
    bool is_lost() noexcept { return ring_.other_closed() || ring_.broken(); }

    // True if anything has moved.
    bool step() {
        if (ended()) return false;
        if (lent_ > 0) return see_loan();
        const bool begins = !begun_;
        if (begins) {
            if (ring_.room(head_.size()) < head_.size()) return false;
            ring_.put(head_.data(), head_.size());
            begun_ = true;
            if (loans_.may_lend_in_exchange(size_)) {
                ring_.publish();
                lent_ = loans_.begin(ring_, data_, size_);
                return true;
            }
        }
        const std::size_t wanted = std::min(size_ - done_, detail::piece_of(size_));
        const std::size_t count = std::min(ring_.room(wanted), wanted);
        if (count == 0 && !begins) return false;
        ring_.put(data_ + done_, count, ring_.copies(size_));
        ring_.publish();
        done_ += count;
        return true;
    }

    // Sleeps until `step` may move something. What it does not find is the end of the deadline, or of the channel.
    Outcome await(const Patience& patience, const Bound& bound) {
        const auto comes = [&] {
            if (ring_.broken()) return true;
            return lent_ > 0 ? loans_.read_so_far(ring_, lent_) != seen_ : ring_.room(begun_ ? 1 : head_.size()) >= (begun_ ? 1 : head_.size());
        };
        return detail::wait_on(ring_, patience, bound, comes);
    }
    Bell& bell() noexcept { return ring_.bell(); }
    // How long what has begun is worth waiting for where nobody asked for its end yet: the other side may be reading it just now.
    std::int64_t grace_ns(bool crowded) const noexcept { return (200'000 + static_cast<std::int64_t>(lent_ / 4)) * (crowded ? 8 : 1); }

    // Nobody reads the array any more after this. What was not read goes through the ring.
    void take_back() noexcept {
        if (lent_ > 0) done_ += loans_.end(ring_, std::exchange(lent_, 0));
        seen_ = 0;
    }

private:
    bool see_loan() noexcept {
        const std::size_t seen = loans_.read_so_far(ring_, lent_);
        if (seen == lent_) {
            take_back();
            return true;
        }
        return seen != std::exchange(seen_, seen);
    }

    MessageLender& loans_;
    RingWriter& ring_;
    const ArrayHead& head_;
    const std::byte* data_;
    std::size_t size_, done_ = 0;
    std::size_t lent_ = 0, seen_ = 0;  // bytes of the loan, and those that were read when this looked last
    bool begun_ = false;
};

// The way in. What comes may be another message than the one that is waited for: then nothing of it is taken.
class Incoming {
public:
    Incoming(RingIn& mapped, const MessageCalls::Message& message) noexcept
        : mapped_(mapped),
          ring_(*mapped.half()),
          head_(message.head),
          data_(static_cast<std::byte*>(message.array.data)),
          size_(message.array.bytes) {}

    bool begun() const noexcept { return begun_; }
    bool ended() const noexcept { return begun_ && done_ == size_; }
    bool refused() const noexcept { return refused_; }
    std::size_t done() const noexcept { return done_; }
    bool is_lost() noexcept { return ring_.other_closed() || ring_.broken(); }

    // Before a wait that lasts.
    void part() noexcept { ring_.part(); }
    // As of `Outgoing`.
    Outcome await(const Patience& patience, const Bound& bound) {
        const auto comes = [&] {
            if (ring_.broken()) return true;
            if (begun_) return ring_.available(1) >= 1 || MessageBorrower::stands(ring_);
            const std::size_t wanted = ring_.available(sizeof(FrameHeader)) < sizeof(FrameHeader) ? sizeof(FrameHeader) : head_.size();
            return ring_.available(wanted) >= wanted;
        };
        return detail::wait_on(ring_, patience, bound, comes);
    }
    Bell& bell() noexcept { return ring_.bell(); }

    // True if anything has moved.
    bool step() noexcept {
        if (ended() || refused_) return false;
        if (!begun_) {
            // The header first: what comes may be shorter than what is waited for.
            for (const std::size_t wanted : {sizeof(FrameHeader), head_.size()}) {
                if (ring_.available(wanted) < wanted) return false;
                refused_ = !ring_.begins_with(head_.data(), wanted);
                if (refused_) return false;
            }
            ring_.skip(head_.size());
            ring_.publish();  // what is lent stands behind it
            begun_ = true;
        }
        const std::size_t wanted = std::min(size_ - done_, detail::piece_of(size_));
        const std::size_t count = std::min(ring_.available(wanted), wanted);
        if (count == 0 && size_ > 0) {
            const std::size_t lent = mapped_.loans.take(ring_, data_ + done_, size_ - done_, false);
            done_ += lent;
            return lent > 0;
        }
        ring_.peek(data_ + done_, count, 0, ring_.copies(size_));
        ring_.skip(count);
        ring_.publish();
        done_ += count;
        return true;
    }

private:
    RingIn& mapped_;
    RingReader& ring_;
    const ArrayHead& head_;
    std::byte* data_;
    std::size_t size_, done_ = 0;
    bool begun_ = false, refused_ = false;
};

// Moves both until they are through, or nothing has moved for a while and it is late, or nobody waits for what is left. Gives way
// to whoever wants one of the channels. `deadline_ns`: of the calls, which counts also while bytes move.
inline void move_both(Outgoing& outgoing, Incoming& incoming, Until until, const Patience& patience, const Bound& out,
                      const Bound& in, std::int64_t deadline_ns) {
    constexpr std::int64_t nap_ns = 50'000;
    const auto came = [&] { return incoming.ended() || incoming.refused(); };
    const auto enough = [&] { return (until == Until::sent && outgoing.ended()) || (until == Until::received && came()); };
    const auto wanted = [](const Bound& bound) { return bound.aborted->load(std::memory_order_relaxed) != 0; };
    for (int idle = 0; !(outgoing.ended() && came()) && !wanted(out) && !wanted(in);) {
        const bool sent = outgoing.step();
        if (incoming.step() || sent) {
            idle = 0;
            if (monotonic_ns() > deadline_ns) return;
            continue;
        }
        if (outgoing.is_lost() || incoming.is_lost()) return;
        if (outgoing.ended() || came()) {
            // Of the one way that is left, the other side wakes this one. If nobody waits for it, what has not begun stays as it
            // is, and what has is worth some more looks.
            const bool comes = outgoing.ended();
            Bound bound = comes ? in : out;
            if (enough()) {
                if (!outgoing.begun() || !incoming.begun()) return;
                bound.deadline_ns = std::min(bound.deadline_ns, monotonic_ns() + outgoing.grace_ns(patience.spins == 0));
            }
            const Outcome outcome = comes ? incoming.await(patience, bound) : outgoing.await(patience, bound);
            if (outcome != Outcome::done) return;
            continue;
        }
        if (idle == patience.spins) incoming.part();
        if (idle < patience.spins) {
            relax();
        } else if (idle < patience.spins + patience.yields) {
            if (detail::timed_yield() > patience.long_yield_ns) idle = patience.spins + patience.yields;
        } else {
            if (monotonic_ns() > std::min(out.deadline_ns, in.deadline_ns)) return;
            const timespec nap{0, nap_ns};
            nanosleep(&nap, nullptr);
        }
        if (idle < patience.spins + patience.yields) ++idle;
    }
}

}  // namespace phalanx
