// A segment: memory that the ranks of a group on one machine share, and how they keep step in it.
//
// Every rank counts its steps, and shows the count (release) once what belongs to the step is written. All ranks take
// the same steps in the same order, so "everybody has reached step s" (acquire) means that what they wrote before it can
// be read. A rank has `depth` slots, and what belongs to step s lies in slot s mod depth. `collectives.hpp` says for each
// operation why nobody still reads a slot that is written again.
//
//   Header | Board of rank 0, 1, ... | lots of rank 0, 1, ... | notes of rank 0, 1, ... | slots of rank 0, 1, ...
//          | heap of rank 0, 1, ...
//
// The heaps hold the arrays of `Group.empty`. They are large and empty: pages exist once they are touched.
//
// A wait that ends badly ends badly for all. Who gives up at step s says so in the verdict, and then looks once more
// whether everybody has come. Whoever finds that all have reached s reads the verdict before it goes on. Both the steps
// and the verdict are in one order for all, so either the late rank sees the verdict and fails as well, or the rank whose
// time was over sees the late one and goes on.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "crew.hpp"
#include "huge_pages.hpp"
#include "jitter.hpp"
#include "long_copy.hpp"
#include "peer_memory.hpp"
#include "spreading.hpp"
#include "waiting.hpp"

namespace phalanx {

inline constexpr std::size_t cache_line = 64;
inline constexpr std::size_t page = 4096;
inline constexpr int depth = 4;
inline constexpr std::uint64_t most_shares = 16, few_shares = 4;  // of a slot

// What a rank shows at a step: the count of its steps, and what others need at once. One cache line, so that a short
// operation costs one transfer between cores.
struct alignas(cache_line) Line {
    Shared<std::uint64_t> step;
    Shared<std::uint64_t> fingerprint;  // the operation's, at its first step
    Shared<std::uint64_t> home;         // where the rank's array can be read: `Segment::offset_of` or `address_of`; 0 if it cannot
    Shared<int> core;                   // where the rank ran when it arrived
    std::byte small[36];
};
static_assert(sizeof(Line) == cache_line);

// What a rank shows in an operation that goes one way (one_way.hpp). It has many of them, so that it need not wait for the
// others each time.
struct alignas(cache_line) Note {
    Shared<std::uint64_t> fingerprint;  // of the operation that its owner is in
    Shared<std::uint64_t> entered;      // at this step
    Shared<std::uint64_t> home;         // as in a line
    std::byte data[424];
    // A request for what could not be read at its home, and the last one that the owner has answered.
    Shared<std::uint64_t> asked;
    Shared<int> asked_of;
    Shared<std::uint64_t> asked_from, asked_bytes;
    Shared<std::uint64_t> answered;
};
static_assert(sizeof(Note) == 512);
inline constexpr std::uint64_t notes = 256;

// Two lines, for even and odd steps: a rank that is one step ahead does not overwrite what others still read.
struct alignas(2 * cache_line) Board {
    Line lines[2];
    Shared<std::uint32_t> left;  // whether the rank has closed its group
    // What the rank waits for, so that it is woken for nothing else: that these have reached a step. It need not come itself.
    alignas(cache_line) Shared<std::uint64_t> awaited_step;
    Shared<int> awaited_first, awaited_last;
};

// A part of what a rank has to do in an operation, of which others take pieces when they are done with theirs (sums.hpp).
struct alignas(cache_line) Lot {
    Shared<std::uint64_t> taken;  // so many pieces
};
inline constexpr int most_lots = Crew::largest + 1;  // one for each hand

// Whether a step was given up, in one word; 0 while none was. A verdict is open until somebody has looked whether those
// came who were awaited, and stays for good if they did not. The step is cut short: ranks are never far apart.
class Verdict {
public:
    static constexpr int everybody = 0xffff;
    static constexpr int others = 0xfffe;  // everybody but the one who gave up

    constexpr explicit Verdict(std::uint64_t word) noexcept : word_(word) {}
    constexpr Verdict(std::uint64_t step, int rank, int awaited, bool open) noexcept
        : word_((step & steps) << 34 | static_cast<std::uint64_t>(rank & 0xffff) << 18 |
                static_cast<std::uint64_t>(awaited & 0xffff) << 2 | (open ? 1U : 2U)) {}

    constexpr std::uint64_t word() const noexcept { return word_; }
    constexpr bool open() const noexcept { return (word_ & 3) == 1; }
    constexpr int rank() const noexcept { return static_cast<int>(word_ >> 18 & 0xffff); }     // who gave up
    constexpr int awaited() const noexcept { return static_cast<int>(word_ >> 2 & 0xffff); }  // and whom it waited for
    constexpr Verdict final() const noexcept { return Verdict((word_ & ~std::uint64_t{3}) | 2); }

    // The whole count of the step, given one that is near.
    constexpr std::uint64_t step(std::uint64_t near) const noexcept {
        const std::uint64_t ahead = ((word_ >> 34) - near) & steps;
        return ahead <= steps / 2 ? near + ahead : near + ahead - (steps + 1);
    }

private:
    static constexpr std::uint64_t steps = (std::uint64_t{1} << 30) - 1;
    std::uint64_t word_;
};

struct Header {
    std::array<unsigned char, 16> nonce;
    alignas(cache_line) Bell bell;
    alignas(cache_line) Shared<std::uint32_t> leavers;  // how many ranks have
    Shared<std::uint64_t> verdict;                 // beside it: a wait reads both
    // Who was the last root to show something, by its step: the step and the rank.
    alignas(cache_line) Shared<std::uint64_t> roots[notes];
    // Whether a kernel may write to the arrays of all ranks; see cuda/flight.hpp.
    alignas(cache_line) Shared<std::uint32_t> flight;
};
static_assert(sizeof(Header) <= page);

// How large the parts are: the same on all ranks.
struct Layout {
    int ranks = 0;
    std::size_t slot_bytes = 0;
    std::size_t heap_bytes = 0;

    std::size_t boards() const noexcept { return page; }
    std::size_t lots() const noexcept { return boards() + rounded(ranks * sizeof(Board)); }
    std::size_t notebooks() const noexcept { return lots() + rounded(ranks * most_lots * sizeof(Lot)); }
    std::size_t slots() const noexcept { return notebooks() + rounded(ranks * notes * sizeof(Note)); }
    std::size_t heaps() const noexcept { return rounded(slots() + ranks * depth * slot_bytes, huge_page); }
    std::size_t heap() const noexcept { return rounded(heap_bytes, huge_page); }
    std::size_t bytes() const noexcept { return heaps() + ranks * heap(); }

    static constexpr std::size_t rounded(std::size_t bytes, std::size_t unit = page) noexcept {
        return (bytes + unit - 1) / unit * unit;
    }
};

// From which size something is done in another way: the same on all ranks. `phalanx.tuning` measures it.
struct Thresholds {
    static constexpr std::size_t never = std::size_t{1} << 40;  // a size that no array reaches

    // Bytes up to which everybody reduces everything in an all_reduce: half the steps are worth twice the work.
    std::size_t reduced_by_all = 16 << 10;
    // Bytes from one rank to another from which they are read where they lie, in the memory of the other's process.
    std::size_t copy_once_from = never;
    // But a gather reads only parts of these lengths there, unless threads help. Shorter and longer ones go through the slots:
    // while its root copies, the other copies the next part, or the next piece, which stays in the caches. The measurement that
    // stands for all operations knows no such lengths. More than two ranks that share cores have none for that.
    std::size_t gather_at_home_from = 128 << 10;
#if defined(__aarch64__)
    std::size_t gather_in_pieces_from = 512 << 10;
    std::size_t all_gather_in_pieces_from = 2 << 20;
    std::size_t crowded_gather_at_home_from = never;
#else
    std::size_t gather_in_pieces_from = 2 << 20;
    std::size_t all_gather_in_pieces_from = never;
    std::size_t crowded_gather_at_home_from = 128 << 10;
#endif
    // Bytes that all ranks together read and write in an operation from which their copies ask ahead for what comes next.
    std::size_t ahead_from = never;
    // Bytes of an array from which a copy that only its rank reads bypasses the caches. If any are long enough for that, all
    // copies do so in an operation that reads and writes more than the last cache holds.
    std::size_t past_from = never;
    std::size_t overflows_caches = last_cache_bytes();
    // Threads of each rank that help it with what is long, and reads where that lies: for cores that the ranks leave free. From
    // so many bytes on they do; what gains less by it begins at a multiple of that.
    int helpers = 0;
    std::size_t worth_helping = 1 << 20;
    // The same for a root that reads what others have where it lies: they rest meanwhile, and leave it their cores.
    int root_helpers = 0;
};

// One rank's view of the segment. Of the threads of a process only one may keep step at a time; `abort` may come from
// any.
class Segment {
public:
    Segment(std::byte* base, const Layout& layout, int rank, const Patience& patience, const Thresholds& thresholds = {})
        : base_(base),
          layout_(layout),
          rank_(rank),
          patience_(patience),
          thresholds_(thresholds),
          spreading_(layout.ranks) {}

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return layout_.ranks; }
    const Layout& layout() const noexcept { return layout_; }
    const Thresholds& thresholds() const noexcept { return thresholds_; }
    std::uint64_t step() const noexcept { return step_; }
    bool crowded() const noexcept { return patience_.spins == 0; }  // whether ranks share cores: a wait gives the core away

    std::byte* slot(int rank, std::uint64_t number) const noexcept {
        return base_ + layout_.slots() + (rank * depth + number % depth) * layout_.slot_bytes;
    }

    // What belongs to a short step that goes one way need not fill a slot: a share of one is enough, so that a rank has many.
    // Where ranks have a core each, a few will do, which stay in the caches.
    std::byte* share_of_slot(int rank, std::uint64_t number) const noexcept {
        return slot(rank, number) + number / depth % shares() * share_bytes();
    }
    std::size_t share_bytes() const noexcept { return layout_.slot_bytes / most_shares; }
    std::uint64_t shares() const noexcept { return crowded() ? most_shares : few_shares; }

    Note& note(int rank, std::uint64_t step) const noexcept {
        return reinterpret_cast<Note*>(base_ + layout_.notebooks())[rank * notes + step % notes];
    }

    std::byte* heap(int rank) const noexcept { return base_ + layout_.heaps() + rank * layout_.heap(); }

    // Where an array of this rank's heap begins, as seen by all; 0 for memory that lies elsewhere.
    std::uint64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
        const auto* at = static_cast<const std::byte*>(memory);
        const std::byte* first = heap(rank_);
        const bool inside = at >= first && at + bytes <= first + layout_.heap_bytes;
        return inside && bytes > 0 ? static_cast<std::uint64_t>(at - base_) : 0;
    }

    // The same for memory that lies elsewhere: its address in this process, and a bit that no address has.
    static std::uint64_t address_of(const void* memory) noexcept {
        return reinterpret_cast<std::uintptr_t>(memory) | in_process;
    }
    static bool is_address(std::uint64_t home) noexcept { return (home & in_process) != 0; }

    // An array of another rank, which must lie in that rank's heap: what was read from shared memory is not trusted.
    std::byte* at(int rank, std::uint64_t offset, std::size_t bytes) const noexcept {
        const auto first = static_cast<std::uint64_t>(heap(rank) - base_);
        const bool inside = offset >= first && offset - first <= layout_.heap_bytes &&
                            bytes <= layout_.heap_bytes - (offset - first);
        return inside ? base_ + offset : nullptr;
    }

    // Reads from the memory of another rank's process. False if that was not possible, or the group has ended meanwhile.
    bool read(int rank, std::byte* to, std::uint64_t home, std::size_t bytes) const noexcept {
        return peers_.read(rank, to, home & ~in_process, bytes, [this] { return aborted(); });
    }

    // Whether this rank can read the memory of all ranks' processes. Where that is never wanted, it is not tried.
    bool try_peers(std::vector<Peer> peers) {
        return thresholds_.copy_once_from < Thresholds::never && peers_.open(std::move(peers));
    }
    // Whether arrays are shown by their address: only while all ranks have found that they can read them.
    bool reads_peers() const noexcept { return reads_peers_; }
    void read_peers(bool possible) noexcept { reads_peers_ = possible; }
    // The same for so many bytes from one rank to another.
    bool copies_once(std::size_t bytes) const noexcept { return reads_peers_ && bytes >= thresholds_.copy_once_from; }

    // What this rank shows at its next step; others see it once it has arrived there.
    Line& next_line() const noexcept { return line(rank_, step_ + 1); }
    const Line& line_of(int rank, std::uint64_t step) const noexcept { return line(rank, step); }

    // What anyone may take once all have met at the next step: of this rank's lots nothing is taken by then.
    void offer_lots() noexcept {
        for (int i = 0; i < most_lots; ++i) lot(rank_, i).taken.store(0, std::memory_order_relaxed);
    }
    Lot& lot(int rank, int i) const noexcept {
        return reinterpret_cast<Lot*>(base_ + layout_.lots())[rank * most_lots + i];
    }

    // Takes the next step, and wakes those who have waited for nobody else.
    void arrive() noexcept {
        ++step_;
        // One order for all: seen before the sleepers are looked at, or one that has just looked would be missed.
        Line& mine = line(rank_, step_);
        mine.core.store(sched_getcpu(), std::memory_order_relaxed);
        mine.step.store(step_, std::memory_order_seq_cst);
        if (const std::uint32_t asleep = sleepers(); asleep != 0)
            if (const std::uint32_t whom = done_waiting(asleep); whom != 0) header().bell.wake(whom);
    }

    // Takes so many steps at once.
    void skip(std::uint64_t steps) noexcept {
        if (steps == 0) return;
        if (steps > 1) {
            step_ += steps - 2;
            arrive();  // both lines have to show it
        }
        arrive();
    }

    // Forgets the last step, for an operation that will take it again. The others have seen it.
    void step_back() noexcept { --step_; }

    // Waits until everybody has reached a step.
    Outcome wait(std::uint64_t step, const Bound& limits) {
        return wait(step, limits, 0, layout_.ranks, Verdict::everybody, [](int) { return false; });
    }

    // Waits until one rank has, or `hopeless(rank)`.
    template <class Hopeless>
    Outcome wait_for(int rank, std::uint64_t step, const Bound& limits, Hopeless hopeless) {
        return wait(step, limits, rank, rank + 1, rank, hopeless);
    }

    // Waits until all others have, or one of them is found that is hopeless.
    template <class Hopeless>
    Outcome wait_for_others(std::uint64_t step, const Bound& limits, Hopeless hopeless) {
        return wait(step, limits, 0, layout_.ranks, Verdict::others, hopeless);
    }

    // The same, without a part in it: if the wait ends badly, nothing has failed. `broken` if somebody gave that step up.
    Outcome watch(std::uint64_t step, const Bound& limits) {
        Bound bound = limits;
        bound.aborted = &aborted_;
        const auto over = [&] {
            const Verdict verdict(header().verdict.load(std::memory_order_seq_cst));
            const bool given_up = verdict.word() != 0 && !verdict.open() && verdict.step(step) <= step;
            return all_reached(step) || given_up || find_leaver(0, layout_.ranks, step);
        };
        leaver_ = -1;
        await(step, 0, layout_.ranks);
        bound.sleeper = bit_of(rank_);
        const Outcome outcome = wait_until(header().bell, patience_, bound, over);
        if (outcome != Outcome::done || all_reached(step)) return outcome;
        return leaver_ >= 0 ? Outcome::left : Outcome::broken;
    }

    bool reached(int rank, std::uint64_t step) const noexcept {
        return line(rank, step).step.load(std::memory_order_seq_cst) >= step;
    }

    // The step that everybody has reached.
    std::uint64_t slowest() const noexcept {
        std::uint64_t found = step_;
        for (int rank = 0; rank < layout_.ranks; ++rank) {
            const Board& board = boards()[rank];
            found = std::min(found, std::max(board.lines[0].step.load(std::memory_order_seq_cst),
                                             board.lines[1].step.load(std::memory_order_seq_cst)));
        }
        return found;
    }

    bool has_sleepers() const noexcept { return sleepers() != 0; }

    // Makes everybody who sleeps look again, or one rank if it does: something else than a step could end its wait.
    void wake_sleepers() noexcept {
        if (has_sleepers()) header().bell.wake();
    }
    void wake_sleeper(int rank) noexcept {
        if ((sleepers() & bit_of(rank)) != 0) header().bell.wake(bit_of(rank));
    }

    // This rank takes itself for the root that shows something. Another rank that did so at the same step; -1 if none.
    int claim_root(std::uint64_t step) noexcept {
        constexpr int bits = 16;
        const std::uint64_t mine = step << bits | static_cast<std::uint64_t>(rank_);
        const std::uint64_t before = header().roots[step % notes].exchange(mine, std::memory_order_seq_cst);
        return before >> bits == step && before != mine ? static_cast<int>(before & ((1 << bits) - 1)) : -1;
    }

    // Fails this step for everybody who is not done with it.
    void give_up(std::uint64_t step) noexcept {
        settle(Outcome::mismatch, step, Verdict::everybody);
        wake_sleepers();
    }

    // Whether an operation may take that step: `aborted` here, or `broken` because another rank gave it up.
    Outcome may_take(std::uint64_t step) noexcept {
        if (aborted()) return Outcome::aborted;
        return settle(Outcome::done, step, Verdict::everybody);
    }

    int breaker() const noexcept { return breaker_; }  // after `broken`: the rank that gave up

    // The ranks that the last wait was for and that had not come.
    std::vector<int> missing() const {
        std::vector<int> found;
        for (int rank = awaited_.first; rank < awaited_.second; ++rank)
            if (rank != rank_ && !reached(rank, waited_for_)) found.push_back(rank);
        return found;
    }

    int leaver() const noexcept { return leaver_; }  // a rank that closed its group before it came

    // This rank will not come again: whoever waits for it need not.
    void leave() noexcept {
        boards()[rank_].left.store(1, std::memory_order_seq_cst);
        header().leavers.fetch_add(1, std::memory_order_seq_cst);
        abort();
    }

    // Ends every wait of this process, now and later.
    void abort() noexcept {
        aborted_.store(1, std::memory_order_seq_cst);
        header().bell.wake();
    }

    bool aborted() const noexcept { return aborted_.load(std::memory_order_relaxed) != 0; }
    const Shared<std::uint32_t>* abort_word() const noexcept { return &aborted_; }

    Shared<std::uint32_t>& flight() const noexcept { return header().flight; }

private:
    static constexpr int moment = 50;  // looks at the others, about a microsecond
    static constexpr int crowded_moment = 8;  // where another rank could have the core meanwhile
    static constexpr std::uint64_t in_process = std::uint64_t{1} << 63;

    // For the ranks from `first` up to `last`; `awaited` says the same for a verdict.
    template <class Hopeless>
    Outcome wait(std::uint64_t step, const Bound& limits, int first, int last, int awaited, Hopeless hopeless) {
        waited_for_ = step;
        awaited_ = {first, last};
        Bound bound = limits;
        bound.aborted = &aborted_;
        bound.stamina = &stamina_;
        int known = first;  // ranks below are there
        bool given_up = false;
        leaver_ = -1;
        const auto ready = [&] {
            while (known < last && (reached(known, step) || (known == rank_ && awaited == Verdict::others))) ++known;
            return known == last || hopeless(known) || find_leaver(known, last, step) ||
                   (given_up = will_not_come(first, last, step));
        };
        const auto crowded = [&] {
            return line(known, step - 1).core.load(std::memory_order_relaxed) == sched_getcpu();
        };
        bool is_ready = ready();
        const int looks = this->crowded() ? crowded_moment : moment;
        for (int i = 0; i < looks && !is_ready; ++i) {
            relax();
            is_ready = ready();
        }
        Outcome outcome = Outcome::done;
        if (!is_ready) {
            spreading_.look(step, rank_, layout_.ranks, [&](int r) {
                return line(r, step - 1).core.load(std::memory_order_relaxed);
            });
            if (bound.before_long != nullptr) bound.before_long(bound.held);
            await(step, first, last);
            bound.sleeper = bit_of(rank_);
            outcome = wait_until(header().bell, patience_, bound, ready, crowded);
            if (bound.after_long != nullptr) bound.after_long(bound.held);
        }
        if (leaver_ >= 0) outcome = Outcome::left;
        if (outcome == Outcome::interrupted && limits.resumable) return outcome;
        if (outcome == Outcome::done && known < last && !given_up) return outcome;  // hopeless: the caller knows why
        return settle(outcome, step, awaited);
    }

    // Whether one of those who are waited for has given the step up before it came.
    bool will_not_come(int first, int last, std::uint64_t step) const noexcept {
        const Verdict verdict(header().verdict.load(std::memory_order_seq_cst));
        if (verdict.word() == 0 || verdict.open() || verdict.step(step) > step) return false;
        return verdict.rank() >= first && verdict.rank() < last && verdict.rank() != rank_ && !reached(verdict.rank(), step);
    }

    // Says what this rank waits for. Seen by whoever sees that it sleeps.
    void await(std::uint64_t step, int first, int last) noexcept {
        Board& mine = boards()[rank_];
        mine.awaited_step.store(step, std::memory_order_relaxed);
        mine.awaited_first.store(first, std::memory_order_relaxed);
        mine.awaited_last.store(last, std::memory_order_relaxed);
    }

    std::uint32_t sleepers() const noexcept { return header().bell.sleepers.load(std::memory_order_seq_cst); }

    static std::uint32_t bit_of(int rank) noexcept { return std::uint32_t{1} << rank % 32; }

    // Who of those that sleep has waited for this rank, and for nobody who has not come by now. Of several who come at once,
    // the last one finds it.
    std::uint32_t done_waiting(std::uint32_t asleep) const noexcept {
        std::uint32_t found = 0;
        for (int r = 0; r < layout_.ranks; ++r) {
            if ((asleep & bit_of(r)) == 0 || r == rank_) continue;
            const Board& board = boards()[r];
            const std::uint64_t step = board.awaited_step.load(std::memory_order_relaxed);
            const int first = board.awaited_first.load(std::memory_order_relaxed);
            const int last = std::min(board.awaited_last.load(std::memory_order_relaxed), layout_.ranks);
            if (rank_ < first || rank_ >= last || first < 0) continue;
            int known = first;
            while (known < last && (known == r || reached(known, step))) ++known;
            if (known >= last) found |= bit_of(r);
        }
        return found;
    }

    // How a wait ends for all ranks alike. Time that is over when everybody has come after all was not over.
    Outcome settle(Outcome outcome, std::uint64_t step, int awaited) noexcept {
        Shared<std::uint64_t>& shared = header().verdict;
        for (Outcome now = outcome;;) {
            std::uint64_t word = shared.load(std::memory_order_seq_cst);
            if (word == 0) {
                if (now == Outcome::done) return now;
                const Verdict mine(step, rank_, awaited, now == Outcome::timed_out);
                if (!shared.compare_exchange_strong(word, mine.word(), std::memory_order_seq_cst)) continue;
                if (!mine.open()) return now;
                decide(mine, step);
                if (has_come(mine, step)) now = Outcome::done;
            } else if (const Verdict found(word); found.open()) {
                decide(found, step);  // not left to the one that opened it: it may be stopped
            } else if (now != Outcome::done || found.step(step) > step) {
                return now;
            } else if (found.rank() == rank_ && outcome != Outcome::done) {
                return outcome;
            } else {
                breaker_ = found.rank();
                if (boards()[breaker_].left.load(std::memory_order_seq_cst) == 0) return Outcome::broken;
                leaver_ = breaker_;  // it closed its group in the middle of the operation
                return Outcome::left;
            }
        }
    }

    void decide(Verdict verdict, std::uint64_t near) noexcept {
        std::uint64_t word = verdict.word();
        const bool moot = has_come(verdict, verdict.step(near));
        header().verdict.compare_exchange_strong(word, moot ? 0 : verdict.final().word(), std::memory_order_seq_cst);
    }

    bool has_come(Verdict verdict, std::uint64_t step) const noexcept {
        if (verdict.awaited() == Verdict::everybody) return all_reached(step);
        return verdict.awaited() == Verdict::others ? all_reached(step, verdict.rank()) : reached(verdict.awaited(), step);
    }

    Header& header() const noexcept { return *reinterpret_cast<Header*>(base_); }

    Board* boards() const noexcept { return reinterpret_cast<Board*>(base_ + layout_.boards()); }
    Line& line(int rank, std::uint64_t step) const noexcept { return boards()[rank].lines[step % 2]; }

    bool find_leaver(int first, int last, std::uint64_t step) noexcept {
        if (header().leavers.load(std::memory_order_seq_cst) == 0) return false;
        for (int rank = first; rank < last; ++rank)
            // In this order: it may have come, and left afterwards.
            if (boards()[rank].left.load(std::memory_order_seq_cst) != 0 && !reached(rank, step)) leaver_ = rank;
        return leaver_ >= 0;
    }

    bool all_reached(std::uint64_t step, int except = -1) const noexcept {
        for (int rank = 0; rank < layout_.ranks; ++rank)
            if (rank != except && !reached(rank, step)) return false;
        return true;
    }

    std::byte* base_;
    Layout layout_;
    int rank_;
    Patience patience_;
    Thresholds thresholds_;
    PeerMemory peers_;
    bool reads_peers_ = false;
    Spreading spreading_;
    Stamina stamina_;
    std::uint64_t step_ = 0;
    std::uint64_t waited_for_ = 0;
    std::pair<int, int> awaited_{0, 0};
    int leaver_ = -1;
    int breaker_ = -1;
    Shared<std::uint32_t> aborted_{0};
};

}  // namespace phalanx
