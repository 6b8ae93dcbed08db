// What this machine can do, measured by threads of this process: how fast bytes move, what a sleep costs, and how fast the
// segment's own collectives are with other settings. `phalanx.tuning` decides by it, and `phalanx bench` has its limits
// from it.
#pragma once

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "collectives.hpp"
#include "long_copy.hpp"
#include "reduce.hpp"
#include "team.hpp"
#include "turns.hpp"

namespace phalanx {

// How bytes get from one place to another.
enum class Mover : int {
    copy,         // memcpy, a tile at a time: where there are several targets, what is written was just in the cache
    whole,        // memcpy of everything at once: the C library knows how for long arrays
    stream,       // stores that bypass the cache
    by_address,   // process_vm_readv, as from another process
    large_tiles,  // as `copy`, with tiles that fit the second-level cache: fewer pages of the memory change
    ahead,        // as `copy`, asking ahead for the lines of both sides
};

// Bytes that are read from `reads` arrays, combined, and written to `writes` arrays; `in_place` if these are the first ones
// of those that were read.
struct Movement {
    std::size_t bytes = 0;
    int reads = 1;
    int writes = 1;
    bool in_place = false;
};

namespace detail {

// Memory as large arrays have it, in huge pages where the system gives them; or shared, as a segment has it.
class Pages {
public:
    explicit Pages(std::size_t bytes, bool shared = false) : bytes_(std::max<std::size_t>(bytes, 1)) {
        constexpr std::size_t huge = 2 << 20;
        const int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_NORESERVE;
        void* at = mmap(nullptr, bytes_ + huge, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        mapped_ = static_cast<std::byte*>(at);
        begin_ = mapped_ + (huge - reinterpret_cast<std::uintptr_t>(at) % huge) % huge;
        if (!shared && bytes_ >= huge) madvise(begin_, bytes_, MADV_HUGEPAGE);
    }
    ~Pages() { munmap(mapped_, bytes_ + (2 << 20)); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::byte* begin() const noexcept { return begin_; }

private:
    std::size_t bytes_;
    std::byte* mapped_;
    std::byte* begin_;
};

constexpr std::size_t tile_bytes = 16 << 10;
constexpr std::size_t large_tile_bytes = 64 << 10;

inline bool read_by_address(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    static const pid_t self = getpid();
    while (bytes > 0) {
        const iovec local{to, bytes};
        const iovec remote{const_cast<std::byte*>(from), bytes};
        const ssize_t moved = process_vm_readv(self, &local, 1, &remote, 1, 0);
        if (moved <= 0) return false;
        to += moved;
        from += moved;
        bytes -= static_cast<std::size_t>(moved);
    }
    return true;
}

}  // namespace detail

// The fewest seconds in which `threads` threads would do a movement if they shared it out by their speeds, which each shows with
// an even part of it, at the same time. Every byte that must be is read once and written once, and no thread waits for another.
// Infinite where the mover cannot do it.
inline double time_movement(const Movement& movement, Mover mover, int threads, const Effort& effort) {
    const bool one_source = movement.reads == 1 && !movement.in_place;
    const bool by_tiles = mover != Mover::whole && mover != Mover::by_address;
    if (!by_tiles && !one_source) return std::numeric_limits<double>::infinity();
    constexpr std::size_t line = 64;
    // No two begin at the same set of a cache, nor in the same bank of the memory.
    const std::size_t stride = (movement.bytes + line - 1) / line * line + 49 * page + line;
    const int arrays = movement.in_place ? std::max(movement.reads, movement.writes) : movement.reads + movement.writes;
    const detail::Pages memory(stride * arrays);
    std::byte* base = memory.begin();
    const auto target = [&](int i) { return base + (movement.in_place ? i : movement.reads + i) * stride; };
    std::atomic<bool> refused{false};
    const CopyBy by = mover == Mover::stream ? CopyBy::past : mover == Mover::ahead ? CopyBy::ahead : CopyBy::plain;

    std::vector<unsigned> rounds(threads, 0);
    const auto move = [&](int member) {
        const std::size_t each = (movement.bytes + threads * line - 1) / (threads * line) * line;
        const std::size_t begin = std::min(member * each, movement.bytes);
        const std::size_t end = std::min(begin + each, movement.bytes);
        if (rounds[member] == 0)  // memory that was never written is one page of zeros, which is always in the cache
            for (int i = 0; i < arrays; ++i) std::memset(base + i * stride + begin, i + 1, end - begin);
        const std::size_t tile = mover == Mover::large_tiles ? detail::large_tile_bytes : detail::tile_bytes;
        const std::size_t step = by_tiles ? tile : std::max<std::size_t>(each, 1);
        std::vector<const std::byte*> sources(movement.reads);
        alignas(64) std::byte total[detail::tile_bytes];
        each_piece(end - begin, step, rounds[member]++ % 2 == 1, [&](std::size_t done, std::size_t bytes) {
            const std::size_t at = begin + done;
            const std::byte* result = base + at;
            if (movement.reads > 1) {
                for (int i = 0; i < movement.reads; ++i) sources[i] = base + i * stride + at;
                std::byte* to = mover == Mover::stream ? total : target(0) + at;
                reduce_many(to, sources.data(), movement.reads, bytes / 4, Dtype::float32, Op::sum, 1);
                result = to;
            }
            for (int i = 0; i < movement.writes; ++i) {
                std::byte* to = target(i) + at;
                if (to == result) continue;
                if (mover == Mover::by_address) {
                    if (!detail::read_by_address(to, result, bytes)) refused.store(true, std::memory_order_relaxed);
                } else {
                    copy_by(by, to, result, bytes);
                }
            }
        });
    };
    const double seconds = best_round(threads, effort, move, if_shared_out);
    return refused.load() ? std::numeric_limits<double>::infinity() : seconds;
}

// Seconds in which each of so many threads copies an array, all at once: one of its own by each of the ways, in their order, and
// then the one that another thread has just written, as in a collective, by the first two. Turn by turn: what is measured first
// is often slower.
inline std::array<double, 5> time_copies(std::size_t bytes, int threads, const Effort& effort) {
    struct Kind {
        CopyBy by;
        bool is_another;
    };
    constexpr std::array<Kind, 5> kinds{
        {{CopyBy::plain, false}, {CopyBy::ahead, false}, {CopyBy::past, false}, {CopyBy::plain, true}, {CopyBy::ahead, true}}};
    const std::size_t stride = (bytes + page - 1) / page * page + page;
    const detail::Pages memory(2 * stride * threads);
    // Memory that was never written is one page of zeros, which is always in the cache.
    std::memset(memory.begin(), 1, 2 * stride * threads);
    const auto array = [&](int member, unsigned which) { return memory.begin() + (2 * member + which % 2) * stride; };
    std::array<double, kinds.size()> seconds;
    seconds.fill(std::numeric_limits<double>::infinity());
    std::vector<unsigned> rounds(threads, 0);
    for (int turn = 0; turn < 2; ++turn)
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const auto [by, is_another] = kinds[i];
            // What one writes in a round, another one reads in the next.
            const double found = best_round(threads, effort, [&, by = by, is_another = is_another](int member) {
                const unsigned round = is_another ? rounds[member]++ : 0;
                copy_by(by, array(member, round + 1), array(is_another ? (member + 1) % threads : member, round), bytes);
            });
            seconds[i] = std::min(seconds[i], found);
        }
    return seconds;
}

// Seconds of one look at another rank, as a rank that spins takes it.
inline double time_look(const Effort& effort) {
    constexpr int looks = 1000;
    const Shared<std::uint64_t> word{0};
    return best_round(1, effort, [&](int) {
               for (int i = 0; i < looks; ++i)
                   if (word.load(std::memory_order_seq_cst) == 0) relax();
           }) /
           looks;
}

// Seconds from the moment at which one thread wakes another that sleeps until that one runs: the median, because a wait
// pays what is usual, not what is best.
inline double time_wake_up(int times, std::int64_t budget_ns) {
    constexpr std::int64_t asleep_ns = 300'000;  // after which who waits surely sleeps, and an idle core as deeply as it does
    struct alignas(64) {
        Bell bell;
        Shared<int> called{0};
        Shared<int> answered{0};
        std::int64_t woken_ns = 0;
    } shared;
    const Shared<std::uint32_t> aborted{0};
    Bound bound;
    bound.aborted = &aborted;
    bound.deadline_ns = monotonic_ns() + budget_ns;
    std::vector<double> found;
    best_round(2, Effort{1, 0}, [&](int member) {
        const int begin = member == 0 ? shared.called.load() : shared.answered.load();
        for (int turn = begin + 1; turn <= begin + times; ++turn) {
            if (member == 1) {
                const auto called = [&] { return shared.called.load() >= turn; };
                if (wait_until(shared.bell, Patience{0, 0}, bound, called) != Outcome::done) return;
                shared.woken_ns = monotonic_ns();
                shared.answered.store(turn);
                continue;
            }
            const std::int64_t before = monotonic_ns();
            while (monotonic_ns() - before < asleep_ns) relax();
            const std::int64_t call_ns = monotonic_ns();
            shared.called.store(turn);
            shared.bell.announce();
            while (shared.answered.load() < turn)
                if (monotonic_ns() > bound.deadline_ns) return;
            found.push_back(static_cast<double>(shared.woken_ns - call_ns) * 1e-9);
        }
    });
    if (found.empty()) return std::numeric_limits<double>::infinity();
    std::nth_element(found.begin(), found.begin() + found.size() / 2, found.end());
    return found[found.size() / 2];
}

namespace detail {

// Seconds of an operation on so many bytes in a segment with these settings, by threads in place of ranks.
// `operation(rank, ops, call)` is one call of it. Infinite if they did not come together.
template <class Operation>
double time_in_segment(std::size_t bytes, const Layout& layout, const Patience& patience, const Thresholds& thresholds, int calls,
                       const Effort& effort, Operation operation) {
    const Pages memory(layout.bytes(), true);
    std::vector<std::unique_ptr<Segment>> segments;
    std::vector<std::unique_ptr<Collectives>> ranks;
    std::vector<OwnProof> proofs(layout.ranks);
    std::vector<Peer> peers;
    for (OwnProof& proof : proofs) peers.push_back({getpid(), proof.set(Proof{}), Proof{}});
    bool can_read = true;
    for (int r = 0; r < layout.ranks; ++r) {
        segments.push_back(std::make_unique<Segment>(memory.begin(), layout, r, patience, thresholds));
        ranks.push_back(std::make_unique<Collectives>(*segments.back()));
        const bool wanted = thresholds.copy_once_from < Thresholds::never;
        if (wanted) segments.back()->read_peers(segments.back()->try_peers(peers));
        can_read = can_read && segments.back()->reads_peers() == wanted;
    }
    if (!can_read) return std::numeric_limits<double>::infinity();
    const std::int64_t end = monotonic_ns() + 2 * effort.budget_ns + 100'000'000;
    std::atomic<bool> apart{false};
    const auto call_often = [&](int r, int times) {
        Call call;
        call.fingerprint = 1;
        call.bound.deadline_ns = end;
        for (int i = 0; i < times; ++i) {
            if (operation(r, *ranks[r], call) == Outcome::done) continue;
            apart.store(true, std::memory_order_relaxed);
            return;
        }
    };
    // The first calls do not count: they touch every slot for the first time.
    best_round(layout.ranks, Effort{1, 0}, [&](int r) { call_often(r, bytes <= layout.slot_bytes ? depth : 1); });
    const double seconds = best_round(layout.ranks, effort, [&](int r) { call_often(r, calls); });
    return apart.load() ? std::numeric_limits<double>::infinity() : seconds / calls;
}

}  // namespace detail

// Of an all_reduce of float32; of a barrier for no bytes.
inline double time_all_reduce(std::size_t bytes, const Layout& layout, const Patience& patience,
                              const Thresholds& thresholds, int calls, const Effort& effort) {
    const std::size_t stride = (bytes + 4095) / 4096 * 4096 + 192;
    const detail::Pages arrays(stride * layout.ranks);
    return detail::time_in_segment(bytes, layout, patience, thresholds, calls, effort, [&](int r, Collectives& ops, const Call& call) {
        if (bytes == 0) return ops.barrier(call);
        return ops.all_reduce(call, arrays.begin() + r * stride, bytes / 4, Combine{Dtype::float32, Op::sum, 1});
    });
}

// Of a gather of so many bytes from each rank.
inline double time_gather(std::size_t bytes, const Layout& layout, const Patience& patience, const Thresholds& thresholds,
                          int calls, const Effort& effort) {
    const std::size_t stride = (bytes + 4095) / 4096 * 4096 + 192;
    const detail::Pages arrays(stride * layout.ranks);
    const detail::Pages target(bytes * layout.ranks);
    return detail::time_in_segment(bytes, layout, patience, thresholds, calls, effort, [&](int r, Collectives& ops, const Call& call) {
        return ops.gather(call, arrays.begin() + r * stride, target.begin(), Lengths(bytes), 0);
    });
}

}  // namespace phalanx
