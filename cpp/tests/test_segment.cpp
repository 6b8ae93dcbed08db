// The collectives inside a segment, without Python: ranks are threads here. Run under the sanitizers by `make sanitize`.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "phalanx/collectives.hpp"
#include "phalanx/fingerprint.hpp"
#include "phalanx/objects.hpp"

using namespace phalanx;

namespace {

constexpr std::int64_t second = 1'000'000'000;

// Every second look at it finds an interrupt.
std::atomic<int> interrupts{0};
bool now_and_then() { return interrupts.fetch_add(1, std::memory_order_relaxed) % 2 == 0; }

struct Rank {
    Segment& segment;
    OwnProof& proof;
    Collectives ops;
    std::uint64_t sequence = 0;
    bool resumable = false;  // operations are interrupted now and then, and run again

    Rank(Segment& s, OwnProof& p) : segment(s), proof(p), ops(s) {}
    int rank() const { return segment.rank(); }
    int ranks() const { return segment.ranks(); }

    Call call(std::uint64_t kind = 1, std::int64_t timeout = 60 * second) {
        Call made;
        made.fingerprint = fingerprint_of(kind, ++sequence, 0, 0);
        made.bound.deadline_ns = monotonic_ns() + timeout;
        made.bound.resumable = resumable;
        if (resumable) made.bound.interrupted = now_and_then;
        return made;
    }

    // Runs an operation until it is not interrupted any more.
    template <class F>
    Outcome run(F operation) {
        Outcome outcome = operation();
        while (resumable && outcome == Outcome::interrupted) {
            const timespec pause{0, 50'000};  // the others may come meanwhile, and read and write
            nanosleep(&pause, nullptr);
            outcome = operation();
        }
        return outcome;
    }
};

// Runs `program` on that many ranks, each a thread, in one segment. All are in one process here, whose memory it may always
// read.
void world(int ranks, const Layout& sizes, const Patience& patience, const std::function<void(Rank&)>& program,
           const Thresholds& thresholds = {}) {
    Layout layout = sizes;
    layout.ranks = ranks;
    const std::size_t bytes = layout.bytes();
    std::unique_ptr<std::byte, void (*)(void*)> memory(static_cast<std::byte*>(std::aligned_alloc(page, bytes)), std::free);
    std::memset(memory.get(), 0, bytes);
    std::vector<std::unique_ptr<Segment>> segments;
    std::vector<OwnProof> proofs(ranks);
    std::vector<Peer> peers;
    for (int r = 0; r < ranks; ++r) {
        segments.push_back(std::make_unique<Segment>(memory.get(), layout, r, patience, thresholds));
        Proof proof;
        proof.fill(static_cast<std::byte>(r + 1));
        peers.push_back({getpid(), proofs[r].set(proof), proof});
    }
    for (const auto& segment : segments) {
        segment->read_peers(segment->try_peers(peers));
        CHECK(segment->reads_peers() == (thresholds.copy_once_from < Thresholds::never));
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            Rank rank(*segments[r], proofs[r]);
            program(rank);
        });
    for (auto& thread : threads) thread.join();
}

std::byte* bytes_of(std::vector<std::int32_t>& values) { return reinterpret_cast<std::byte*>(values.data()); }

std::vector<std::int32_t> values_of(int rank, std::size_t count, std::uint64_t salt) {
    std::vector<std::int32_t> values(count);
    for (std::size_t i = 0; i < count; ++i)
        values[i] = static_cast<std::int32_t>(mix(salt * 1000003 + rank * 977 + i) & 0xffffff);
    return values;
}

std::vector<std::int32_t> total_of(int ranks, std::size_t count, std::uint64_t salt) {
    std::vector<std::int32_t> total(count, 0);
    for (int r = 0; r < ranks; ++r) {
        const auto part = values_of(r, count, salt);
        for (std::size_t i = 0; i < count; ++i) total[i] += part[i];
    }
    return total;
}

const Combine sum{Dtype::int32, Op::sum, 1};

// What a program may do with its array as soon as it has it back.
void wipe(std::vector<std::int32_t>& array) { std::fill(array.begin(), array.end(), -2); }

// The parts of an array, each in memory of its own. `sizes`: their bytes.
struct PartsApart {
    PartsApart(const std::vector<std::int32_t>& whole, const std::vector<std::size_t>& sizes) {
        auto at = whole.begin();
        for (const std::size_t size : sizes) {
            parts.emplace_back(at, at + size / 4);
            at += size / 4;
        }
        for (auto& part : parts) places.push_back(bytes_of(part));
    }
    std::vector<std::int32_t> joined() const {
        std::vector<std::int32_t> whole;
        for (const auto& part : parts) whole.insert(whole.end(), part.begin(), part.end());
        return whole;
    }
    void wipe() {
        for (auto& part : parts) ::wipe(part);
    }

    std::vector<std::vector<std::int32_t>> parts;
    std::vector<std::byte*> places;
};

// A random program, the same on all ranks: lengths from nothing to many pieces, one operation after another.
void random_program(Rank& me, unsigned seed, int operations) {
    std::mt19937 random(seed);
    const int n = me.ranks(), r = me.rank();
    for (int turn = 0; turn < operations; ++turn) {
        const int what = static_cast<int>(random() % 10);
        const std::size_t lengths[] = {0, 1, 3, 10, 100, 5000, 20000};
        const std::size_t count = lengths[random() % 7] + random() % 3;
        const int root = static_cast<int>(random() % n);
        const std::uint64_t salt = random();
        auto mine = values_of(r, count, salt);
        const Call call = me.call(what + 1);
        const bool apart = (salt >> r) % 2 == 0;  // on some ranks
        if (what == 0) {
            CHECK(me.run([&] { return me.ops.barrier(call); }) == Outcome::done);
        } else if (what == 1) {
            CHECK(me.run([&] { return me.ops.broadcast(call, bytes_of(mine), 4 * count, root); }) == Outcome::done);
            CHECK(mine == values_of(root, count, salt));
        } else if (what == 2) {
            CHECK(me.run([&] { return me.ops.all_reduce(call, bytes_of(mine), count, sum); }) == Outcome::done);
            CHECK(mine == total_of(n, count, salt));
        } else if (what == 3) {
            CHECK(me.run([&] { return me.ops.reduce(call, bytes_of(mine), count, sum, root); }) == Outcome::done);
            CHECK(mine == (r == root ? total_of(n, count, salt) : values_of(r, count, salt)));
        } else if (what == 4 || what == 5) {
            std::vector<std::size_t> counts(n);
            std::vector<std::int32_t> expected;
            for (int i = 0; i < n; ++i) {
                const std::size_t length = what == 4 ? count : (count * (i + 1)) / 2;
                counts[i] = 4 * length;
                const auto part = values_of(i, length, salt);
                expected.insert(expected.end(), part.begin(), part.end());
            }
            auto source = values_of(r, counts[r] / 4, salt);
            std::vector<std::int32_t> target(expected.size(), -1);
            const bool to_all = what == 4;
            PartsApart parts(target, counts);
            const Targets targets = apart ? Targets::apart(parts.places.data()) : Targets(bytes_of(target));
            CHECK(me.run([&] {
                return to_all ? me.ops.all_gather(call, bytes_of(source), targets, counts)
                              : me.ops.gather(call, bytes_of(source), targets, counts, root);
            }) == Outcome::done);
            wipe(source);
            if (to_all || root == r) CHECK((apart ? parts.joined() : target) == expected);
        } else if (what == 6) {
            std::vector<std::size_t> counts(n);
            for (int i = 0; i < n; ++i) counts[i] = 4 * ((count * (i + 1)) / 2);
            const std::size_t all = std::accumulate(counts.begin(), counts.end(), std::size_t{0}) / 4;
            auto source = values_of(root, all, salt);
            std::size_t start = 0;
            for (int i = 0; i < r; ++i) start += counts[i] / 4;
            const std::vector<std::int32_t> expected(source.begin() + start, source.begin() + start + counts[r] / 4);
            std::vector<std::int32_t> target(counts[r] / 4, -1);
            CHECK(me.run([&] { return me.ops.scatter(call, bytes_of(source), bytes_of(target), counts, root); }) == Outcome::done);
            wipe(source);
            CHECK(target == expected);
        } else if (what == 7) {
            std::vector<std::size_t> sizes(n * n);
            for (auto& size : sizes) size = 4 * (random() % (count + 1));
            std::vector<std::int32_t> expected;
            for (int i = 0; i < n; ++i) {
                const auto theirs = values_of(i, 1 + (count + 1) * n, salt);
                std::size_t start = 0;
                for (int j = 0; j < r; ++j) start += sizes[i * n + j] / 4;
                expected.insert(expected.end(), theirs.begin() + start, theirs.begin() + start + sizes[i * n + r] / 4);
            }
            auto source = values_of(r, 1 + (count + 1) * n, salt);
            std::vector<std::int32_t> target(expected.size(), -1);
            std::vector<std::size_t> sent(sizes.begin() + r * n, sizes.begin() + (r + 1) * n), received(n);
            for (int i = 0; i < n; ++i) received[i] = sizes[i * n + r];
            PartsApart from(source, sent), to(target, received);
            const Sources sources = apart ? Sources::apart(from.places.data()) : Sources(bytes_of(source));
            const bool to_apart = (salt + r) % 3 == 0;
            const Targets targets = to_apart ? Targets::apart(to.places.data()) : Targets(bytes_of(target));
            CHECK(me.run([&] { return me.ops.all_to_all(call, sources, targets, sizes); }) == Outcome::done);
            wipe(source);
            from.wipe();
            CHECK((to_apart ? to.joined() : target) == expected);
        } else if (what == 8) {  // only the root knows how long the parts are; some take nothing
            auto source = values_of(root, count * n, salt);
            const std::vector<std::int32_t> expected(source.begin() + r * count, source.begin() + (r + 1) * count);
            auto words = values_of(root, random() % 250, salt + 1);
            Collectives::Parts parts;
            if (r == root) parts = {4 * count, salt, {bytes_of(words), 4 * words.size()}};
            PartsApart from(source, std::vector<std::size_t>(n, 4 * count));
            const Sources sources = apart ? Sources::apart(from.places.data()) : Sources(bytes_of(source));
            CHECK(me.run([&] { return me.ops.tell_parts(call, r == root ? sources : Sources(nullptr), parts, root); }) == Outcome::done);
            const Collectives::Parts told = me.ops.told();
            CHECK(told.bytes == 4 * count && told.kind == salt && told.words.size() == 4 * words.size());
            CHECK(words.empty() || std::memcmp(told.words.data(), words.data(), 4 * words.size()) == 0);
            const bool takes = (salt + r) % 5 != 0;
            std::vector<std::int32_t> target(count, -1);
            CHECK(me.run([&] { return me.ops.take_part(call, takes ? bytes_of(target) : nullptr); }) == Outcome::done);
            wipe(source);
            from.wipe();
            CHECK(target == (takes ? expected : std::vector<std::int32_t>(count, -1)));
        } else {
            auto source = values_of(r, count * n, salt);
            const auto total = total_of(n, count * n, salt);
            std::vector<std::int32_t> target(count, -1);
            PartsApart from(source, std::vector<std::size_t>(n, 4 * count));
            const Sources sources = apart ? Sources::apart(from.places.data()) : Sources(bytes_of(source));
            CHECK(me.run([&] { return me.ops.reduce_scatter(call, sources, bytes_of(target), count, sum); }) == Outcome::done);
            from.wipe();
            CHECK(std::equal(target.begin(), target.end(), total.begin() + r * count));
        }
    }
}

void heap_arrays(Rank& me, std::size_t count = 50000) {
    auto* mine = reinterpret_cast<std::int32_t*>(me.segment.heap(me.rank()));
    for (std::uint64_t turn = 0; turn < 8; ++turn) {
        auto values = values_of(me.rank(), count, turn);
        const bool in_heap = turn % 2 == 0 || me.rank() % 2 == 0;  // all of them, and some of them
        std::byte* at = in_heap ? reinterpret_cast<std::byte*>(mine) : bytes_of(values);
        std::memcpy(at, values.data(), 4 * count);
        CHECK(me.ops.all_reduce(me.call(), at, count, sum) == Outcome::done);
        CHECK(std::memcmp(at, total_of(me.ranks(), count, turn).data(), 4 * count) == 0);
        std::vector<std::int32_t> gathered(count * me.ranks());
        const std::vector<std::size_t> counts(me.ranks(), 4 * count);
        CHECK(me.ops.all_gather(me.call(), at, bytes_of(gathered), counts) == Outcome::done);
        CHECK(std::memcmp(gathered.data() + count * (me.ranks() - 1), at, 4 * count) == 0);
        const int root = static_cast<int>(turn) % me.ranks();
        CHECK(me.ops.gather(me.call(), at, bytes_of(gathered), counts, root) == Outcome::done);
        if (me.rank() == root) CHECK(std::memcmp(gathered.data(), at, 4 * count) == 0);
        const std::size_t part = count / me.ranks();
        std::vector<std::int32_t> own(part);
        CHECK(me.ops.scatter(me.call(), at, bytes_of(own), Lengths(4 * part), root) == Outcome::done);
        CHECK(std::memcmp(own.data(), at + 4 * part * me.rank(), 4 * part) == 0);
        CHECK(me.ops.broadcast(me.call(), at, 4 * count, me.ranks() - 1) == Outcome::done);
        std::memset(at, 0xff, 4 * count);  // nobody reads it any more
    }
}

// Long arrays in heaps, of which all ranks do what is left to do. Now and then rank 0 is away while all have met: the others do
// its part, but for the last piece of each lot, and it finds that when it is back. `away`: so many times.
void parts_of_others(Rank& me, std::atomic<std::uint64_t>& away) {
    constexpr std::size_t count = 150'000;
    std::byte* at = me.segment.heap(me.rank());
    for (std::uint64_t turn = 0; turn < 8; ++turn) {
        const bool to_all = turn % 4 < 2;
        const int root = static_cast<int>(turn) % me.ranks();
        const auto values = values_of(me.rank(), count, turn);
        std::memcpy(at, values.data(), 4 * count);
        Call call = me.call();
        const auto operation = [&] {
            return to_all ? me.ops.all_reduce(call, at, count, sum) : me.ops.reduce(call, at, count, sum, root);
        };
        if (turn % 2 == 1 && me.rank() == 0) {
            call.bound.resumable = true;
            call.bound.interrupted = [] { return true; };
            CHECK(operation() == Outcome::interrupted);
            away.fetch_add(1);
            for (int lot = 0; lot < (me.segment.thresholds().helpers > 0 ? 2 : 1); ++lot)
                while (me.segment.lot(0, lot).taken.load() < 2) sched_yield();
            call.bound.interrupted = nullptr;
        }
        while (turn % 2 == 1 && away.load() <= turn / 2) me.segment.wake_sleepers(), sched_yield();
        CHECK(operation() == Outcome::done);
        const bool has_total = to_all || me.rank() == root;
        const auto expected = has_total ? total_of(me.ranks(), count, turn) : values;
        CHECK(std::memcmp(at, expected.data(), 4 * count) == 0);
    }
}

// One rank's memory cannot be read any more, in the middle of a program: all do the operation again, or fetch it from its
// owner, and go on without.
void unreadable(Rank& me, unsigned seed) {
    random_program(me, seed, 20);
    CHECK(me.segment.reads_peers());
    if (me.rank() == me.ranks() - 1) me.proof.erase();
    random_program(me, seed + 1, 40);
    std::vector<std::int32_t> mine(5000 * me.ranks(), me.rank()), all(5000 * me.ranks(), -1);
    CHECK(me.ops.all_to_all(me.call(), bytes_of(mine), bytes_of(all), Lengths(4 * 5000)) == Outcome::done);
    for (int r = 0; r < me.ranks(); ++r) CHECK(all[5000 * r] == r && all[5000 * r + 4999] == r);
}

// The same in the middle of sums of long arrays: some tiles were summed by then, others were not.
void unreadable_meanwhile(Rank& me, unsigned seed) {
    const std::size_t count = 400'003;
    auto x = values_of(me.rank(), count, seed);
    CHECK(me.ops.barrier(me.call()) == Outcome::done);
    std::thread eraser;
    if (me.rank() == me.ranks() - 1)
        eraser = std::thread([&, seed] {
            const timespec span{0, static_cast<long>(mix(seed) % 1'500'000)};
            nanosleep(&span, nullptr);
            me.proof.erase();
        });
    for (std::uint64_t turn = 0; turn < 4; ++turn) {
        auto y = values_of(me.rank(), count, seed + turn);
        CHECK(me.ops.all_reduce(me.call(), bytes_of(y), count, sum) == Outcome::done);
        CHECK(y == total_of(me.ranks(), count, seed + turn));
        wipe(y);
        const std::size_t part = 100'001;
        auto source = values_of(me.rank(), part * me.ranks(), seed + turn + 7);
        const auto total = total_of(me.ranks(), part * me.ranks(), seed + turn + 7);
        std::vector<std::int32_t> target(part, -1);
        CHECK(me.ops.reduce_scatter(me.call(), bytes_of(source), bytes_of(target), part, sum) == Outcome::done);
        wipe(source);
        CHECK(std::equal(target.begin(), target.end(), total.begin() + me.rank() * part));
    }
    if (eraser.joinable()) eraser.join();
}

// Arrays in heaps and by address in one operation.
void mixed(Rank& me) {
    const std::size_t count = 50000;
    const int n = me.ranks();
    auto* heap = me.segment.heap(me.rank());
    for (std::uint64_t turn = 0; turn < 6; ++turn) {
        auto values = values_of(me.rank(), count * n, turn);
        const bool in_heap = (turn + me.rank()) % 2 == 0;
        if (in_heap) std::memcpy(heap, values.data(), 4 * count * n);
        std::vector<std::int32_t> found(count * n, -1);
        std::byte* at = in_heap ? heap : bytes_of(values);
        CHECK(me.ops.all_to_all(me.call(), at, bytes_of(found), Lengths(4 * count)) == Outcome::done);
        std::memset(at, 0xff, 4 * count * n);
        for (int r = 0; r < n; ++r) {
            const auto theirs = values_of(r, count * n, turn);
            CHECK(std::equal(found.begin() + r * count, found.begin() + (r + 1) * count, theirs.begin() + me.rank() * count));
        }
        CHECK(me.segment.reads_peers());
    }
}

// Parts that some ranks read where they lie, and others take out of the root's slot. Later nobody can read those of the last
// rank any more. The parts of every second scatter lie apart, some of them in the heap if there is one.
void parts_both_ways(Rank& me) {
    const int n = me.ranks();
    for (std::uint64_t turn = 0; turn < 32; ++turn) {
        if (turn == 16 && me.rank() == n - 1) me.proof.erase();
        const int root = static_cast<int>(turn / 2) % n;
        const std::size_t count = turn % 8 == 7 ? 9 : 140'000 / (n - 1) + 7 * turn;
        auto source = values_of(root, count * n, turn);
        const std::vector<std::int32_t> expected(source.begin() + me.rank() * count, source.begin() + (me.rank() + 1) * count);
        PartsApart from(source, std::vector<std::size_t>(n, 4 * count));
        std::byte* const heap = me.segment.heap(me.rank());
        const int in_heap = me.segment.layout().heap_bytes > 0 ? static_cast<int>(turn / 2) % (n + 1) : 0;
        for (int r = 0; r < in_heap && me.rank() == root; ++r) {
            std::byte* const place = heap + r * 4 * count;
            std::memcpy(place, from.places[r], 4 * count);
            from.places[r] = place;
        }
        Collectives::Parts parts;
        if (me.rank() == root) parts = {4 * count, turn};
        const Sources sources = turn % 2 == 0 ? Sources(bytes_of(source)) : Sources::apart(from.places.data());
        CHECK(me.ops.tell_parts(me.call(), me.rank() == root ? sources : Sources(nullptr), parts, root) == Outcome::done);
        CHECK(me.ops.told().bytes == 4 * count);
        std::vector<std::int32_t> target(count, -1);
        const bool takes = turn % 10 < 8;
        CHECK(me.ops.take_part(me.call(), takes ? bytes_of(target) : nullptr) == Outcome::done);
        wipe(source);  // nobody reads it any more
        from.wipe();
        for (int r = 0; r < in_heap && me.rank() == root; ++r) std::memset(from.places[r], 0xff, 4 * count);
        CHECK(target == (takes ? expected : std::vector<std::int32_t>(count, -1)));
        if (turn % 3 == 0) CHECK(me.ops.barrier(me.call()) == Outcome::done);
    }
}

// What the last rank says of where its parts lie is changed before the others look: by an address where nothing lies, or a place
// that is not in its heap. Who cannot read there asks for its part; nobody reads outside the root's memory.
void forged_homes(Rank& me, bool apart, std::uint64_t forged, std::atomic<bool>& told) {
    const int n = me.ranks(), root = n - 1;
    const std::size_t count = 140'000;
    auto source = values_of(root, count * n, 5);
    const std::vector<std::int32_t> expected(source.begin() + me.rank() * count, source.begin() + (me.rank() + 1) * count);
    PartsApart from(source, std::vector<std::size_t>(n, 4 * count));
    Collectives::Parts parts;
    if (me.rank() == root) parts = {4 * count, 5};
    while (me.rank() != root && !told) sched_yield();
    const Sources sources = apart ? Sources::apart(from.places.data()) : Sources(bytes_of(source));
    CHECK(me.ops.tell_parts(me.call(), me.rank() == root ? sources : Sources(nullptr), parts, root) == Outcome::done);
    if (me.rank() == root) {
        Note& note = me.segment.note(root, me.segment.step());
        CHECK(Segment::is_address(note.home.load()));
        note.home.store(forged);
        constexpr std::size_t head = 24;  // what comes before the homes of parts that lie apart
        for (int r = 0; r < n; ++r) std::memcpy(note.data + head + r * sizeof(forged), &forged, sizeof(forged));
        told = true;
    }
    std::vector<std::int32_t> target(count, -1);
    CHECK(me.ops.take_part(me.call(), bytes_of(target)) == Outcome::done);
    if (me.rank() == root || Segment::is_address(forged)) CHECK(target == expected);
}

// Runs of scatters whose root runs ahead, and may write into the slots of the others: between them those take the last pieces
// of a sum out of their slots.
void many_scatters(Rank& me) {
    const int n = me.ranks();
    for (std::uint64_t turn = 0; turn < 120; ++turn) {
        if (turn % 7 == 0) {
            const std::size_t count = (1 + turn / 7 % 4) * me.segment.layout().slot_bytes / 4 - turn;
            auto x = values_of(me.rank(), count, turn);
            CHECK(me.ops.all_reduce(me.call(), bytes_of(x), count, sum) == Outcome::done);
            CHECK(x == total_of(n, count, turn));
        }
        const int root = turn / 20 % 2 == 0 ? 0 : static_cast<int>(turn) % n;
        const std::size_t count = turn % 11 == 10 ? 3 : 2000 + turn * 100;
        auto source = values_of(root, count * n, turn);
        const std::vector<std::int32_t> expected(source.begin() + me.rank() * count, source.begin() + (me.rank() + 1) * count);
        Collectives::Parts parts;
        if (me.rank() == root) parts = {4 * count, turn};
        CHECK(me.ops.tell_parts(me.call(), me.rank() == root ? bytes_of(source) : nullptr, parts, root) == Outcome::done);
        std::vector<std::int32_t> target(count, -1);
        CHECK(me.ops.take_part(me.call(), bytes_of(target)) == Outcome::done);
        wipe(source);
        CHECK(target == expected);
    }
}

// Operations that are interrupted before all ranks have met, and run again: nobody else notices. Sleepers are woken for nothing
// all the time, so that they look for interrupts.
void interrupted(Rank& me, unsigned seed, std::atomic<int>& left) {
    me.resumable = true;
    std::thread bell;
    if (me.rank() == 0)
        bell = std::thread([&] {
            while (left.load() > 0) me.segment.wake_sleepers(), std::this_thread::yield();
        });
    random_program(me, seed, 60);
    left.fetch_sub(1);
    if (me.rank() == 0) bell.join();
}

void mismatch(Rank& me) {
    std::vector<std::int32_t> x(1000, 1);
    const bool odd = me.rank() == me.ranks() - 1;
    const Outcome outcome = me.ops.all_reduce(me.call(odd ? 1 : 2), bytes_of(x), odd ? 10 : 1000, sum);
    CHECK(outcome == Outcome::mismatch);
    CHECK(me.ops.culprit() == (odd ? 0 : me.ranks() - 1));
}

// Two ranks that both broadcast, though neither waits for the other: the second one finds out, and the first one when it
// looks whether everybody has come.
void two_roots(Rank& me) {
    std::vector<std::int32_t> x(4, me.rank());
    const int last = me.ranks() - 1;
    const int root = me.rank() == last ? last : 0;
    Call call = me.call();
    call.fingerprint = fingerprint_of(1, me.sequence, 4, root);
    const Outcome outcome = me.ops.broadcast(call, bytes_of(x), 16, root);
    if (root != me.rank()) {  // it may have read what rank 0 showed before anybody noticed
        CHECK(outcome == Outcome::done || outcome == Outcome::broken);
    } else if (outcome == Outcome::mismatch) {
        CHECK(me.ops.culprit() == (root == 0 ? last : 0));
    } else if (outcome == Outcome::broken) {  // the other root was quicker to find out
        CHECK(me.segment.breaker() == (root == 0 ? last : 0));
    } else {
        CHECK(outcome == Outcome::done);
        const Outcome at_end = me.ops.flush(call.bound);
        CHECK(at_end == Outcome::broken || at_end == Outcome::mismatch);
        CHECK(me.ops.all_reduce(me.call(1, second / 5), bytes_of(x), 4, sum) != Outcome::done);
    }
}

// A rank gives an operation up that it has come to, and the others are in the next one: it will not come there, and nobody is in
// another operation.
bool after_a_while() {
    const timespec span{0, 200'000'000};
    nanosleep(&span, nullptr);
    return true;
}

void gave_up_before(Rank& me) {
    const int last = me.ranks() - 1;
    std::vector<std::int32_t> x(10, 1);
    Call call = me.call();
    if (me.rank() == last) {
        call.bound.interrupted = after_a_while;
    } else {
        const timespec span{0, 150'000'000};  // the last one sleeps by then, and its time for signals comes
        nanosleep(&span, nullptr);
    }
    const Outcome outcome = me.ops.all_reduce(call, bytes_of(x), x.size(), sum);
    if (me.rank() == last) return;
    CHECK(outcome == Outcome::done || outcome == Outcome::broken);
    if (outcome != Outcome::done) return;
    CHECK(me.ops.barrier(me.call(2)) == Outcome::broken);
    CHECK(me.segment.breaker() == last);
}

// A rank without threads shows and reads as the others do.
void without_threads(Rank& me, unsigned seed) {
    if (me.rank() == 0) me.ops.dismiss();
    random_program(me, seed, 40);
}

// A rank that comes late to what another has given up does not succeed, whatever it is.
void late(Rank& me, int what, std::atomic<int>& given_up) {
    CHECK(me.ops.barrier(me.call()) == Outcome::done);
    const std::size_t count = what == 1 ? 4 : 30000;
    auto x = values_of(me.rank(), count, 1);
    std::vector<std::int32_t> all(count * me.ranks());
    const bool comes_late = me.rank() == me.ranks() - 1;
    while (comes_late && given_up != me.ranks() - 1) sched_yield();
    const Call call = me.call(1, comes_late ? 60 * second : second / 20);
    Outcome outcome = Outcome::done;
    if (what == 0) outcome = me.ops.barrier(call);
    if (what == 1) outcome = me.ops.broadcast(call, bytes_of(x), 4 * count, me.ranks() - 1);
    if (what == 2) outcome = me.ops.all_reduce(call, bytes_of(x), count, sum);
    if (what == 3) outcome = me.ops.all_gather(call, bytes_of(x), bytes_of(all), Lengths(4 * count));
    // On a busy machine one of the others may come so late, too.
    CHECK(outcome == Outcome::broken || (!comes_late && outcome == Outcome::timed_out));
    if (comes_late) CHECK(me.segment.breaker() >= 0 && me.segment.breaker() < me.ranks() - 1);
    if (!comes_late) ++given_up;
}

struct Tally {
    std::atomic<int> ready{0}, done{0};
};

// A deadline that passes just when the last rank comes: all succeed, or none does.
void close_call(Rank& me, Tally& tally, int turn) {
    ++tally.ready;
    while (tally.ready < me.ranks()) sched_yield();
    const std::int64_t wait = 20'000;
    const std::int64_t began = monotonic_ns();
    const bool comes_late = me.rank() == turn % me.ranks();
    while (comes_late && monotonic_ns() < began + wait + (turn % 40 - 20) * 500) relax();
    if (me.ops.barrier(me.call(1, comes_late ? second : wait)) == Outcome::done) ++tally.done;
}

// A step that was given up stays near enough to be told from those after it, also when its count has been cut.
void verdicts() {
    for (const std::uint64_t step : {std::uint64_t{1}, std::uint64_t{1} << 30, (std::uint64_t{1} << 40) - 3}) {
        const Verdict open(step, 3, 7, true);
        CHECK(open.open() && !open.final().open() && open.final().word() != 0);
        CHECK(open.final().rank() == 3 && open.final().awaited() == 7);
        for (const int away : {-64, -1, 0, 1, 64})
            if (away >= 0 || step > 64) CHECK(open.step(step + away) == step);
    }
}

// Everybody only shows something: a root to all, and the others to a root. Nobody waits, so nobody notices before the next
// meeting, or when the group is closed.
void all_show(Rank& me, bool closes) {
    std::vector<std::int32_t> x(4, me.rank());
    const Call call = me.call(me.rank() == 0 ? 1 : 2);
    const Outcome outcome = me.rank() == 0 ? me.ops.broadcast(call, bytes_of(x), 16, 0)
                                           : me.ops.gather(call, bytes_of(x), nullptr, Lengths(16), 0);
    CHECK(outcome == Outcome::done || outcome == Outcome::broken);
    if (outcome != Outcome::done) return;
    const Outcome then = closes ? me.ops.flush(call.bound) : me.ops.barrier(me.call(1, second));
    CHECK(then == Outcome::mismatch || then == Outcome::broken || (!closes && then == Outcome::timed_out));
}

// Two take themselves for the root that all others show something to: both wait.
void two_sinks(Rank& me) {
    std::vector<std::int32_t> x(4, me.rank()), all(4 * me.ranks());
    const int root = me.rank() == 0 ? 0 : me.ranks() - 1;
    Call call = me.call(1, 5 * second);
    call.fingerprint = fingerprint_of(1, me.sequence, 4, root);
    const Outcome outcome = me.ops.gather(call, bytes_of(x), bytes_of(all), Lengths(16), root);
    const bool waits = me.rank() == root;
    CHECK(outcome == Outcome::mismatch || (!waits && (outcome == Outcome::done || outcome == Outcome::broken)) ||
          (waits && outcome == Outcome::broken));
}

// Those who show something to a root may be far ahead of it.
void many_gathers(Rank& me) {
    for (std::uint64_t turn = 0; turn < 1600; ++turn) {
        const int root = static_cast<int>(turn / 400) % me.ranks();
        const std::size_t count = turn % 50 == 0 ? 3000 : turn % 120;
        auto x = values_of(me.rank(), count, turn);
        std::vector<std::int32_t> all(count * me.ranks(), -1);
        CHECK(me.ops.gather(me.call(), bytes_of(x), bytes_of(all), Lengths(4 * count), root) == Outcome::done);
        wipe(x);
        for (int r = 0; r < me.ranks() && me.rank() == root; ++r) {
            const auto theirs = values_of(r, count, turn);
            CHECK(std::equal(theirs.begin(), theirs.end(), all.begin() + r * count));
        }
        if (turn % 797 == 0) CHECK(me.ops.barrier(me.call()) == Outcome::done);
    }
}

// Each takes another one for the root: all would wait.
void no_root(Rank& me) {
    std::vector<std::int32_t> x(4, me.rank());
    const int root = (me.rank() + 1) % me.ranks();
    Call call = me.call();
    call.fingerprint = fingerprint_of(1, me.sequence, 4, root);
    CHECK(me.ops.broadcast(call, bytes_of(x), 16, root) == Outcome::mismatch);
    CHECK(me.ops.culprit() == root);
}

// The root may be far ahead of the others, in turns.
// What lies in notes, in shares of slots and in whole slots, by turns, and operations at which all meet between them. Those who
// only show run ahead of a rank that is slow now and then, and reads what nobody may have written again.
void all_lengths(Rank& me, unsigned seed) {
    std::mt19937 random(seed);  // the same on all ranks
    std::mt19937 pauses(seed * 31 + me.rank());
    const int n = me.ranks();
    for (std::uint64_t turn = 0; turn < 600; ++turn) {
        const std::size_t count = std::vector<std::size_t>{20, 200, 900, 900, 3000, 20000}[random() % 6];
        const int root = turn / 100 % 2 == 0 ? 0 : static_cast<int>(random() % n);
        if (pauses() % 40 == 0) {
            const timespec span{0, 300'000};
            nanosleep(&span, nullptr);
        }
        auto x = values_of(me.rank(), count, turn);
        std::vector<std::int32_t> all(count * n, -1);
        const std::size_t kind = random() % 16;
        if (kind < 6) {
            CHECK(me.ops.gather(me.call(), bytes_of(x), bytes_of(all), Lengths(4 * count), root) == Outcome::done);
            for (int r = 0; r < n && me.rank() == root; ++r) {
                const auto theirs = values_of(r, count, turn);
                CHECK(std::equal(theirs.begin(), theirs.end(), all.begin() + r * count));
            }
        } else if (kind < 10) {
            CHECK(me.ops.broadcast(me.call(), bytes_of(x), 4 * count, root) == Outcome::done);
            CHECK(x == values_of(root, count, turn));
        } else if (kind < 13) {
            auto source = values_of(root, count * n, turn);
            const std::vector<std::int32_t> expected(source.begin() + me.rank() * count, source.begin() + (me.rank() + 1) * count);
            CHECK(me.ops.scatter(me.call(), bytes_of(source), bytes_of(x), Lengths(4 * count), root) == Outcome::done);
            wipe(source);
            CHECK(x == expected);
        } else if (kind < 15) {
            CHECK(me.ops.reduce(me.call(), bytes_of(x), count, sum, root) == Outcome::done);
            if (me.rank() == root) CHECK(x == total_of(n, count, turn));
        } else {
            CHECK(me.ops.all_gather(me.call(), bytes_of(x), bytes_of(all), Lengths(4 * count)) == Outcome::done);
            const auto last = values_of(n - 1, count, turn);
            CHECK(std::equal(last.begin(), last.end(), all.begin() + (n - 1) * count));
        }
        wipe(x);
    }
}

void many_broadcasts(Rank& me) {
    for (std::uint64_t turn = 0; turn < 1600; ++turn) {
        const int root = static_cast<int>(turn / 400) % me.ranks();
        auto x = values_of(me.rank(), turn % 120, turn);
        CHECK(me.ops.broadcast(me.call(), bytes_of(x), 4 * x.size(), root) == Outcome::done);
        CHECK(x == values_of(root, turn % 120, turn));
        if (turn % 797 == 0) CHECK(me.ops.barrier(me.call()) == Outcome::done);
    }
}

// Rank 1 sleeps until rank 2 comes. That rank 0 does so again and again does not wake it.
void sleeps_on(Rank& me, std::atomic<bool>& told) {
    const auto never = [](int) { return false; };
    if (me.rank() == 0) {
        while (!me.segment.has_sleepers()) sched_yield();
        for (int i = 0; i < 100; ++i) {
            me.segment.arrive();
            CHECK(me.segment.has_sleepers());
        }
        told = true;
    } else if (me.rank() == 1) {
        CHECK(me.segment.wait_for(2, 1, me.call().bound, never) == Outcome::done);
    } else {
        while (!told) sched_yield();
        me.segment.arrive();
    }
}

// More ranks than the bell has bits: some are woken with others.
void many_ranks(Rank& me) {
    for (std::uint64_t turn = 0; turn < 30; ++turn) {
        auto x = values_of(me.rank(), 5, turn);
        CHECK(me.ops.all_reduce(me.call(), bytes_of(x), 5, sum) == Outcome::done);
        CHECK(x == total_of(me.ranks(), 5, turn));
        const int root = static_cast<int>(turn) % me.ranks();
        auto y = values_of(me.rank(), 5, turn);
        CHECK(me.ops.broadcast(me.call(), bytes_of(y), 20, root) == Outcome::done);
        CHECK(y == values_of(root, 5, turn));
    }
}

void missing_rank(Rank& me) {
    if (me.rank() == 1) return;
    CHECK(me.ops.barrier(me.call(1, second / 5)) == Outcome::timed_out);
    CHECK(me.segment.missing() == std::vector<int>{1});
}

void aborted(Rank& me) {
    if (me.rank() == 1) return;
    std::thread other([&] {
        timespec pause{0, 50'000'000};
        nanosleep(&pause, nullptr);
        me.segment.abort();
    });
    const std::int64_t began = monotonic_ns();
    CHECK(me.ops.barrier(me.call()) == Outcome::aborted);
    CHECK(monotonic_ns() - began < 5 * second);
    CHECK(me.ops.barrier(me.call()) == Outcome::aborted);
    other.join();
}

// Objects of all lengths, those that just fit a block or just do not among them. All ranks draw the same numbers.
void objects(Rank& me, unsigned seed) {
    std::mt19937 random(seed);
    for (int turn = 0; turn < 60; ++turn) {
        std::vector<std::vector<std::byte>> bytes(me.ranks());
        std::vector<EncodedObject> all;
        for (int r = 0; r < me.ranks(); ++r) {
            constexpr std::size_t edges[] = {0, ObjectMoves::short_block - 24, ObjectMoves::long_block - 24, 5000, 300'000};
            const std::size_t edge = edges[random() % 5];
            bytes[r].resize(edge + random() % 3 - (edge == 0 ? 0 : 1));
            for (std::byte& byte : bytes[r]) byte = static_cast<std::byte>(r + turn);
            all.push_back({bytes[r].size() / 2, bytes[r]});
        }
        const int root = static_cast<int>(random() % me.ranks());
        const unsigned verb = random() % 4;
        ObjectMoves moves(me.ops, me.rank(), me.ranks());
        const Call call = me.call(10 + verb);
        std::vector<std::byte> everything;
        const auto second = [&](std::size_t size, auto steps) {
            everything.resize(size);
            return steps(call.once_met(), everything.data());
        };
        const EncodedObject& mine = all[me.rank()];
        const Outcome outcome = verb == 0   ? moves.broadcast(call, me.rank() == root ? mine : EncodedObject{}, root, second)
                                : verb == 1 ? moves.gather(call, mine, -1, second)
                                : verb == 2 ? moves.gather(call, mine, root, second)
                                            : moves.scatter(call, me.rank() == root ? all : std::vector<EncodedObject>{}, root, second);
        CHECK(outcome == Outcome::done);
        const bool gathers = verb == 1 || verb == 2;
        if ((verb == 2 && me.rank() != root) || (verb == 3 && me.rank() == root)) continue;
        CHECK(moves.found().size() == (gathers ? all.size() : 1));
        for (std::size_t i = 0; i < moves.found().size(); ++i) {
            const EncodedObject& found = moves.found()[i];
            const EncodedObject& sent = all[gathers ? i : verb == 0 ? root : me.rank()];
            CHECK(found.head == sent.head && std::ranges::equal(found.bytes, sent.bytes));
        }
    }
}

}  // namespace

int main() {
    const Layout small{0, 4096, 1 << 20};
    const Layout large{0, 64 << 10, 1 << 20};
    for (const int ranks : {1, 2, 3, 5})
        for (const Patience& patience : {Patience{0, 0}, Patience{200, 2}})
            world(ranks, large, patience, [&](Rank& me) { objects(me, ranks * 7 + 1); });
    for (const Patience& patience : {Patience{0, 0}, Patience{200, 2}})
        for (const int ranks : {1, 2, 3, 4, 7})
            for (const Layout& layout : {small, large})
                world(ranks, layout, patience, [&](Rank& me) { random_program(me, ranks * 31 + 7, 40); });
    const Thresholds by_address{.copy_once_from = 1, .gather_at_home_from = 0};
    const Thresholds by_all{.reduced_by_all = 1 << 20};
    const Thresholds helped{.copy_once_from = 1, .helpers = 2, .worth_helping = 4096};
    Thresholds past_caches = by_address, helped_past_caches = helped;
    past_caches.overflows_caches = helped_past_caches.overflows_caches = 1000;
    past_caches.past_from = helped_past_caches.past_from = 1000;
    Thresholds ahead = by_address, own_past = by_address;
    ahead.ahead_from = own_past.past_from = 1000;
    for (const int ranks : {1, 2, 3, 4, 7})
        for (const Layout& layout : {small, large})
            world(ranks, layout, Patience{200, 2}, [&](Rank& me) { random_program(me, ranks * 31 + 7, 40); }, by_address);
    for (const int ranks : {2, 3, 7})
        for (const Layout& layout : {small, large})
            for (const Thresholds& thresholds : {by_all, helped, past_caches, helped_past_caches, ahead, own_past})
                world(ranks, layout, Patience{200, 2}, [&](Rank& me) { random_program(me, ranks * 31 + 7, 40); }, thresholds);
    // Where ranks share cores, and threads help a root that reads.
    Thresholds rooted = by_address;
    rooted.crowded_gather_at_home_from = 1;
    rooted.root_helpers = 2;
    rooted.worth_helping = 4096;
    for (const int ranks : {2, 3, 7}) {
        for (const Layout& layout : {small, large})
            world(ranks, layout, Patience{0, 2}, [&](Rank& me) { random_program(me, ranks * 31 + 7, 40); }, rooted);
        world(ranks, large, Patience{0, 2}, [&](Rank& me) { unreadable(me, ranks); }, rooted);
        world(ranks, large, Patience{0, 2}, [&](Rank& me) { unreadable_meanwhile(me, ranks); }, rooted);
        world(ranks, large, Patience{0, 2}, many_gathers, rooted);
    }
    for (const int ranks : {2, 3, 4})
        for (unsigned seed = 0; seed < 6; ++seed) {
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { unreadable(me, seed * 100); }, helped);
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { unreadable_meanwhile(me, seed * 100); }, helped);
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { unreadable_meanwhile(me, seed * 100); }, helped_past_caches);
        }
    for (const int ranks : {2, 3, 4}) {
        for (unsigned seed = 0; seed < 6; ++seed)
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { unreadable(me, seed * 100); }, by_address);
        for (const Thresholds& thresholds : {by_address, helped}) world(ranks, large, Patience{100, 1}, mixed, thresholds);
        for (const Thresholds& thresholds : {by_address, helped}) {
            for (const std::size_t heap : {0, 1 << 20})
                world(ranks + 1, Layout{0, 1 << 20, heap}, Patience{100, 1}, parts_both_ways, thresholds);
            for (const bool apart : {false, true})
                for (const std::uint64_t forged : {Segment::address_of(nullptr) + 8, std::uint64_t{8}}) {
                    std::atomic<bool> told{false};
                    const auto program = [&](Rank& me) { forged_homes(me, apart, forged, told); };
                    world(ranks, Layout{0, 64 << 10, 0}, Patience{100, 1}, program, thresholds);
                }
            world(ranks, large, Patience{100, 1}, [](Rank& me) { heap_arrays(me); }, thresholds);
        }
        world(ranks, large, Patience{100, 1}, mismatch, by_address);
        std::atomic<int> given_up{0};
        world(ranks, large, Patience{100, 1}, [&](Rank& me) { late(me, 3, given_up); }, by_address);
    }
    for (const int ranks : {2, 3, 4})
        for (const Layout& layout : {small, large})
            for (const Thresholds& thresholds : {Thresholds{}, by_address, helped})
                for (unsigned seed = 0; seed < 4; ++seed) {
                    std::atomic<int> left{ranks};
                    world(ranks, layout, Patience{0, 0}, [&](Rank& me) { interrupted(me, 17 * seed + ranks, left); }, thresholds);
                }
    for (const int ranks : {2, 3, 4, 7})
        for (const Thresholds& thresholds : {Thresholds{}, by_address}) world(ranks, large, Patience{0, 0}, many_scatters, thresholds);
    CHECK(interrupts.load() > 1000);
    verdicts();
    for (const int ranks : {2, 3, 4})
        for (const Thresholds& thresholds : {Thresholds{}, helped}) {
            std::atomic<std::uint64_t> away{0};
            world(ranks, large, Patience{0, 0}, [&](Rank& me) { parts_of_others(me, away); }, thresholds);
        }
    for (const int ranks : {2, 3, 4}) {
        world(ranks, large, Patience{100, 1}, [](Rank& me) { heap_arrays(me); });
        for (const std::size_t count : {5000, 15000, 50000})  // within a slot, and beyond
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { heap_arrays(me, count); }, by_all);
        world(ranks, large, Patience{100, 1}, mismatch);
        world(ranks, large, Patience{100, 1}, gave_up_before);
        world(ranks, large, Patience{100, 1}, [&](Rank& me) { without_threads(me, ranks); }, helped);
        world(ranks, large, Patience{100, 1}, two_roots);
        world(ranks, large, Patience{100, 1}, no_root);
        world(ranks, large, Patience{100, 1}, many_broadcasts);
        for (const Patience& patience : {Patience{100, 1}, Patience{0, 0}})
            for (const Thresholds& thresholds : {Thresholds{}, by_address})
                world(ranks, large, patience, [&](Rank& me) { all_lengths(me, ranks); }, thresholds);
        world(ranks, large, Patience{100, 1}, many_gathers);
        world(ranks, large, Patience{100, 1}, two_sinks);
        world(ranks, large, Patience{100, 1}, [](Rank& me) { all_show(me, true); });
        world(ranks, large, Patience{100, 1}, [](Rank& me) { all_show(me, false); });
        world(ranks, large, Patience{100, 1}, missing_rank);
        world(ranks, large, Patience{100, 1}, aborted);
        for (int what = 0; what < 4; ++what) {
            std::atomic<int> given_up{0};
            world(ranks, large, Patience{100, 1}, [&](Rank& me) { late(me, what, given_up); });
        }
    }
    std::atomic<bool> told{false};
    world(3, small, Patience{0, 0}, [&](Rank& me) { sleeps_on(me, told); });
    world(40, small, Patience{0, 0}, many_ranks);
    for (int turn = 0; turn < 300; ++turn) {
        const int ranks = 2 + turn % 2;
        Tally tally;
        world(ranks, Layout{0, 64, 0}, Patience{100, 1}, [&](Rank& me) { close_call(me, tally, turn); });
        CHECK(tally.done == 0 || tally.done == ranks);
    }
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
