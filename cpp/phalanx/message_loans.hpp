// Long messages that the receiver reads where they lie, with threads that help it (lending.hpp), in place of the rest of
// their bytes in the ring.
//
// The loan stands beside the ring: the sender says at which byte of the ring the lent ones come in. Whoever has read the ring
// up to there reads on in the sender's memory. The sender waits, and what was not read by then goes through the ring, as if
// nothing had been lent. A receiver that cannot read it says so, once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>

#include "phalanx/lending.hpp"
#include "phalanx/transfer.hpp"

namespace phalanx {

class MessageLender {
public:
    // Messages from so many bytes on; 0: none.
    std::size_t lends_from = 0;
    // Bytes that the other side has read where they lie.
    std::uint64_t lent = 0;

    bool may_lend(std::size_t bytes) const noexcept { return lends_from != 0 && bytes >= lends_from; }

    // The same where messages go both ways at once: both cores are busy, and a copy less is a gain from much shorter ones on.
    std::size_t exchanges_from = 0;
    bool may_lend_in_exchange(std::size_t bytes) const noexcept { return exchanges_from != 0 && bytes >= exchanges_from; }

    // A loan that is not waited for: begins it, looks at it, ends it. Returns how many bytes are lent, or were read; 0: none.
    std::size_t begin(RingWriter& ring, const std::byte* memory, std::size_t most) {
        const std::size_t bytes = std::min(most, Loan::longest);
        std::optional<PayloadPart> part;
        try {
            part = lender_.offer(ring, memory, bytes);
        } catch (const std::exception&) {
            // There is no memory for it: the ring has its own.
        }
        if (!part) {
            lends_from = exchanges_from = 0;
            return 0;
        }
        ring.control().offer.set(*part, ring.position());
        ring.wake_other();
        return bytes;
    }
    std::size_t read_so_far(RingWriter& ring, std::size_t bytes) const noexcept { return lender_.read_so_far(ring, bytes); }
    std::size_t end(RingWriter& ring, std::size_t bytes) noexcept { return ended(lender_.end(ring, bytes)); }

    // As `write_on` in transfer.hpp, by the quicker of the two ways.
    Outcome write_on(RingWriter& ring, const std::byte* from, std::size_t size, std::size_t& done, const Patience& patience,
                     const Bound& bound) {
        const std::size_t left = size - done;
        if (!may_lend(left)) return phalanx::write_on(ring, from, size, done, patience, bound);
        const bool loan = way_.is_loan();
        const std::int64_t since = monotonic_ns();
        for (bool all = loan; all && done < size;) {
            const std::size_t offered = std::min(size - done, Loan::longest);
            const std::size_t taken = lend(ring, from + done, offered, bound);
            done += taken;
            all = taken == offered;
        }
        const Outcome outcome = phalanx::write_on(ring, from, size, done, patience, bound);
        if (outcome == Outcome::done) way_.note(loan, left, monotonic_ns() - since, true);
        return outcome;
    }

private:
    static constexpr std::int64_t look_ns = 200'000;
    static constexpr std::int64_t stay_ns = 20'000'000;  // without progress: the receiver does something else

    // Returns how many of the bytes were read.
    std::size_t lend(RingWriter& ring, const std::byte* memory, std::size_t bytes, const Bound& bound) {
        if (begin(ring, memory, bytes) == 0) return 0;
        const std::int64_t stay = std::clamp(bound.deadline_ns - monotonic_ns(), std::int64_t{0}, stay_ns);
        return ended(lender_.wait(ring, bytes, look_ns, stay, bound.aborted));
    }

    std::size_t ended(std::size_t taken) noexcept {
        if (lender_.refused() || lender_.broken()) lends_from = exchanges_from = 0;
        lent += taken;
        return taken;
    }

    Lender lender_;
    QuickerWay way_;
};

class MessageBorrower {
public:
    // From then on it reads what the process at the other end lends, with so many of the crew, which must outlive this.
    void borrow_from(pid_t pid, SharedCrew* crew, int helpers) { borrower_.emplace(pid, crew, helpers); }

    // Whether what comes next is lent. Any thread may look.
    static bool stands(RingReader& ring) noexcept { return found(ring).has_value(); }

    // Reads on, a part of it. 0 if it is not lent, or cannot be read: then it comes through the ring. `lender_rests`: as for
    // Borrower::read; in an exchange it reads as well.
    std::size_t take(RingReader& ring, std::byte* to, std::size_t most, bool lender_rests) noexcept {
        const std::optional<Standing> standing = found(ring);
        if (!standing) return 0;
        const auto& [part, taken] = *standing;
        try {
            if (borrower_) return borrower_->read(ring, part, taken, to, std::min({most, part.bytes - taken, slice}), lender_rests);
        } catch (const std::exception&) {
            // There is no memory for it.
        }
        refuse(ring, part, taken);
        return 0;
    }

    // As `read_on` in transfer.hpp.
    Outcome read_on(RingReader& ring, std::byte* to, std::size_t size, std::size_t& done, const Patience& patience,
                    const Bound& bound) {
        Outcome outcome = Outcome::done;
        while (done < size && outcome == Outcome::done) {
            outcome = phalanx::read_on(ring, to, size, done, patience, bound, [&ring] { return stands(ring); });
            if (outcome == Outcome::done && done < size) done += take(ring, to + done, size - done, true);
        }
        return outcome;
    }

private:
    static constexpr std::size_t slice = 16 << 20;  // whoever wants the channel meanwhile waits for so many bytes

    struct Standing {
        PayloadPart part;
        std::size_t taken;
    };

    static std::optional<Standing> found(RingReader& ring) noexcept {
        const std::uint64_t word = ring.control().loan.load(std::memory_order_acquire);
        if (word == 0 || (word & (Loan::closed | Loan::refused)) != 0 || ring.has_bytes()) return std::nullopt;
        const auto [part, position] = ring.control().offer.get();
        const std::size_t taken = Loan::taken(word);
        const bool fits = Loan::is_of(word, part.number) && position == ring.shown_position() && taken < part.bytes;
        return fits ? std::optional(Standing{part, taken}) : std::nullopt;
    }

    static void refuse(RingReader& ring, const PayloadPart& part, std::size_t taken) noexcept {
        std::uint64_t word = Loan::open(part.number) + taken;
        ring.control().loan.compare_exchange_strong(word, word | Loan::closed | Loan::refused, std::memory_order_acq_rel);
        ring.wake_other();
    }

    std::optional<Borrower> borrower_;
};

}  // namespace phalanx
