// Long payloads that the receiver reads where they lie, in the memory of the sender's process.
//
// The payload of such a frame comes in parts through the ring. A part has its bytes behind it, or says where they lie. Then
// the sender waits, and the receiver reads (peer_memory.hpp) and counts what it has read in a word of the ring's memory.
// Both change this word by one exchange. The receiver keeps what it read only if the word was still open then. The sender
// closes it before it goes on, for whatever reason: the memory is its own again, and it knows how much the receiver has.
// The rest goes through the ring. So a receiver that is slow, that may not read, or that reads memory which has changed
// since, costs time and nothing else.
#pragma once

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "phalanx/peer_memory.hpp"
#include "phalanx/ring.hpp"
#include "phalanx/shared_crew.hpp"

namespace phalanx {

// The word of a loan: its number, whether it is closed and whether the receiver cannot read it, and the bytes it has read.
struct Loan {
    static constexpr std::uint64_t longest = std::uint64_t{1} << 30;
    static constexpr std::uint64_t closed = std::uint64_t{1} << 63;
    static constexpr std::uint64_t refused = std::uint64_t{1} << 62;

    static std::uint64_t open(std::uint32_t number) noexcept { return std::uint64_t{number & 0xffffff} << 36; }
    static std::uint64_t taken(std::uint64_t word) noexcept { return word & ((std::uint64_t{1} << 36) - 1); }
    static bool is_of(std::uint64_t word, std::uint32_t number) noexcept {
        return (word & ~(closed | refused)) - taken(word) == open(number);
    }
};

// Which way was quicker of late: through the ring two cores copy at the same time, by a loan one copies once, perhaps with
// threads that help. What is better depends on the machine, and on who else wants its cores just now.
class QuickerWay {
public:
    // Whether to lend now. Each way is tried first, and the slower one again now and then.
    bool is_loan() noexcept {
        const bool quicker = loan_ <= ring_;
        if (loan_ == 0 || ring_ == 0 || ++choices_ < pause_) return quicker;
        choices_ = 0;
        pause_ = quicker == was_quicker_ ? std::min(2 * pause_, longest_pause()) : shortest_pause;
        was_quicker_ = quicker;
        return !quicker;
    }

    // So long it took to send so many bytes. `whole`: all of them went; else the rest takes about as long again.
    void note(bool loan, std::size_t bytes, std::int64_t ns, bool whole) noexcept {
        const double cost = static_cast<double>(whole ? ns : 2 * ns) / static_cast<double>(bytes);
        double& known = loan ? loan_ : ring_;
        // One that took long may have met a busy moment, and the way that is not taken is not seen again for long.
        known = known == 0 ? cost : known + (cost - known) / (cost < known ? 2 : 4);
    }

private:
    static constexpr unsigned shortest_pause = 16;

    // The tries may cost a hundredth of the time in the long run.
    unsigned longest_pause() const noexcept {
        const double lost = std::max(loan_, ring_) / std::min(loan_, ring_) - 1;
        return static_cast<unsigned>(std::clamp(100 * lost, double{shortest_pause}, 1024.0));
    }

    double loan_ = 0;  // ns for a byte
    double ring_ = 0;
    bool was_quicker_ = false;  // a loan was, at the last try
    unsigned pause_ = shortest_pause;  // choices from one try to the next
    unsigned choices_ = 0;             // since the last one
};

// The sender's side. One loan at a time.
class Lender {
public:
    // The part that offers this memory. None if it cannot be offered.
    std::optional<PayloadPart> offer(RingWriter& ring, const void* memory, std::size_t bytes) {
        if (proof_ == nullptr && !prove()) return std::nullopt;
        const std::uint64_t proof_at = proof_->set(secret_);
        ring.control().loan.store(Loan::open(++number_), std::memory_order_relaxed);  // the part is published after it
        return PayloadPart{1, number_, bytes, reinterpret_cast<std::uintptr_t>(memory), proof_at, secret_};
    }

    // Waits until all was read, or nothing for so long. Returns the bytes that were; then the memory is the sender's again.
    // `aborted`: somebody wants it back sooner.
    std::size_t wait(RingWriter& ring, std::size_t bytes, std::int64_t look_ns, std::int64_t stay_ns,
                     const Shared<std::uint32_t>* aborted = nullptr) noexcept {
        static const Shared<std::uint32_t> never{0};
        const Shared<std::uint32_t>& is_aborted = aborted != nullptr ? *aborted : never;
        Shared<std::uint64_t>& word = ring.control().loan;
        std::uint64_t seen = Loan::open(number_);
        while (Loan::taken(seen) != bytes && (seen & Loan::refused) == 0) {
            const auto changed = [&] { return word.load(std::memory_order_acquire) != seen || ring.other_closed(); };
            if (!comes(ring, changed, look_ns, stay_ns, is_aborted) || ring.other_closed()) break;
            seen = word.load(std::memory_order_acquire);
        }
        return end(ring, bytes);
    }

    // The same in two steps, for who does something else meanwhile. How many bytes were read so far; all of them if there will be no
    // more.
    std::size_t read_so_far(RingWriter& ring, std::size_t bytes) const noexcept {
        const std::uint64_t seen = ring.control().loan.load(std::memory_order_acquire);
        const bool goes_on = (seen & Loan::refused) == 0 && Loan::is_of(seen, number_);
        return goes_on ? std::min(static_cast<std::size_t>(Loan::taken(seen)), bytes) : bytes;
    }
    std::size_t end(RingWriter& ring, std::size_t bytes) noexcept {
        const std::uint64_t seen = ring.control().loan.fetch_or(Loan::closed, std::memory_order_acq_rel);
        proof_->erase();
        refused_ = refused_ || (seen & Loan::refused) != 0;
        broken_ = !Loan::is_of(seen, number_) || Loan::taken(seen) > bytes;
        return broken_ ? 0 : static_cast<std::size_t>(Loan::taken(seen));
    }

    bool refused() const noexcept { return refused_; }  // the other side could not read once: nothing more is lent
    bool broken() const noexcept { return broken_; }    // the other side has written what cannot be

private:
    bool prove() {
        if (getrandom(secret_.data(), secret_.size(), GRND_NONBLOCK) != static_cast<ssize_t>(secret_.size())) return false;
        proof_ = std::make_unique<OwnProof>();
        return true;
    }

    template <class Ready>
    static bool comes(RingWriter& ring, Ready ready, std::int64_t look_ns, std::int64_t stay_ns,
                      const Shared<std::uint32_t>& aborted) noexcept {
        const std::int64_t since = monotonic_ns();
        for (std::int64_t now = since; now - since < look_ns && aborted.load(std::memory_order_relaxed) == 0; now = monotonic_ns()) {
            if (ready()) return true;
            relax();
        }
        const Bound bound{.deadline_ns = since + look_ns + stay_ns, .aborted = &aborted};
        return detail::wait_asleep(ring.bell(), bound, ready) == Outcome::done;
    }

    std::unique_ptr<OwnProof> proof_;
    Proof secret_{};
    std::uint32_t number_ = 0;
    bool refused_ = false;
    bool broken_ = false;
};

// The receiver's side.
class Borrower {
public:
    // `pid`: the process at the other end. So many of the crew, if there is one, may read along at any time.
    Borrower(pid_t pid, SharedCrew* crew, int helpers) noexcept : pid_(pid), crew_(crew), helpers_(helpers) {}

    // Reads on. 0 if that cannot be done, or the sender waits no more: then the rest comes in another part. `lender_rests`: it
    // does nothing else, and soon sleeps, so that its core is free for one that helps.
    std::size_t read(RingReader& ring, const PayloadPart& part, std::size_t done, std::byte* to, std::size_t bytes, bool lender_rests) {
        const std::uint64_t before = Loan::open(part.number) + done;
        std::uint64_t found = before;
        // Not if it is over already: the address may be another's array by now.
        const bool stands = ring.control().loan.load(std::memory_order_acquire) == before;
        const bool came = stands && knows(part) && read_all(to, part.address + done, bytes, lender_rests ? std::max(helpers_, 1) : helpers_);
        const std::uint64_t after = came ? before + bytes : before | Loan::closed | Loan::refused;
        const bool kept = ring.control().loan.compare_exchange_strong(found, after, std::memory_order_acq_rel);
        ring.wake_other();
        return came && kept ? bytes : 0;
    }

private:
    static constexpr std::size_t worth_helping = 1 << 20;

    bool knows(const PayloadPart& part) {
        if (known_ && part.proof_at == proof_at_ && part.proof == proof_) return true;
        proof_at_ = part.proof_at;
        proof_ = part.proof;
        return known_ = memory_.open({Peer{pid_, part.proof_at, part.proof}});
    }

    bool read_piece(std::byte* to, std::uint64_t from, std::size_t bytes) const noexcept {
        return memory_.read(0, to, from, bytes, [] { return false; });
    }

    // One core does not copy as fast as the memory could.
    bool read_all(std::byte* to, std::uint64_t from, std::size_t bytes, int helpers) const noexcept {
        std::atomic<bool> fine{true};
        auto read_part = [&](std::size_t begin, std::size_t size) {
            if (!read_piece(to + begin, from + begin, size)) fine.store(false, std::memory_order_relaxed);
        };
        const bool helped = crew_ != nullptr && crew_->share(bytes, helpers, worth_helping, read_part);
        if (!helped) read_part(0, bytes);
        return fine.load(std::memory_order_relaxed);
    }

    pid_t pid_;
    SharedCrew* crew_;
    int helpers_;
    PeerMemory memory_;
    bool known_ = false;
    std::uint64_t proof_at_ = 0;
    Proof proof_{};
};

}  // namespace phalanx
