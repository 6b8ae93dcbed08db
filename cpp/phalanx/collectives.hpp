// The collectives inside a segment.
//
// Every operation begins with a step at which all ranks show its fingerprint (and, if it is short, all of its data) and
// meet: so ranks in different operations find out at once, before anybody reads a byte. What is too long for a slot goes
// in pieces, and the next piece is written while others still read the one before.
//
// Why no slot is written while somebody reads it: what was shown at step s is read before its reader takes step s + 2,
// and whoever writes for step t has seen everybody at step t - 2. With four slots the writer of step t overwrites what
// was shown at t - 4, and that was read before step t - 2. The two lines of a board are written by short operations only,
// which have one step, so that the writer of step t has seen everybody at t - 1.
//
// A short broadcast is the exception: its root does not wait, and the others wait for the root alone. What it shows lies
// in a note of its own, and is written again only when everybody has read it, 64 steps later. Before any other operation
// a rank waits until all have caught up, so that the above holds again. Two ranks that both take themselves for the root
// would not notice it there: so a root claims the step, and the second one finds the first one's claim. What a rank shows
// next also stands for the broadcasts before, because the others may have taken either of them for the root.
//
// An operation that is interrupted while it waits for the others at its first step may run again, in another thread. It takes
// the same step again, and writes nothing anew: the others may be reading it.
//
// An array in the rank's heap is not copied: the others read it where it lies. So they do with a long array that lies
// elsewhere and is only moved, where that is quicker and all can (peer_memory.hpp). Nobody goes on before all have read. At
// that last step each rank says whether it could. If one could not, all do the operation once more through the slots, and
// from then on all operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fingerprint.hpp"
#include "jitter.hpp"
#include "reduce.hpp"
#include "segment.hpp"

namespace phalanx {

// What is the same for every operation.
struct Call {
    std::uint64_t fingerprint = 0;
    Bound bound;
};

struct Combine {
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    std::int64_t divisor = 1;
};

// Bytes of parts: of each its own, or the same of all.
class Lengths {
public:
    explicit constexpr Lengths(std::size_t same) noexcept : same_(same) {}
    Lengths(std::span<const std::size_t> each) noexcept : each_(each) {}
    Lengths(const std::vector<std::size_t>& each) noexcept : each_(each) {}

    std::size_t operator[](int i) const noexcept { return each_.empty() ? same_ : each_[i]; }
    std::size_t longest() const noexcept {
        return each_.empty() ? same_ : *std::max_element(each_.begin(), each_.end());
    }
    std::size_t sum_before(int i) const noexcept {
        if (each_.empty()) return i * same_;
        std::size_t sum = 0;
        for (int k = 0; k < i; ++k) sum += each_[k];
        return sum;
    }
    // One row of a square matrix.
    Lengths row(int i, int columns) const noexcept {
        return each_.empty() ? *this : Lengths(each_.subspan(i * columns, columns));
    }

private:
    std::span<const std::size_t> each_;
    std::size_t same_ = 0;
};

class Collectives {
public:
    explicit Collectives(Segment& segment) : s_(segment), homes_(segment.ranks()), addresses_(segment.ranks()) {}

    int culprit() const noexcept { return culprit_; }  // after a mismatch: a rank that is in another operation

    // The ranks that an operation failed because of.
    std::vector<int> blamed(Outcome outcome) const {
        if (outcome == Outcome::timed_out) return s_.missing();
        if (outcome == Outcome::mismatch) return {culprit_};
        if (outcome == Outcome::left) return {s_.leaver()};
        if (outcome == Outcome::broken) return {s_.breaker()};
        return {};
    }

    // Before the group is closed: waits until everybody has taken part in the last short broadcast that this rank was the
    // root of, or will not.
    Outcome flush(const Bound& bound) { return shown_ != 0 ? s_.watch(shown_, bound) : Outcome::done; }

    Outcome barrier(const Call& call) {
        if (const Outcome late = catch_up(call); late != Outcome::done) return late;
        s_.next_line().home.store(0, std::memory_order_relaxed);
        return meet(call);
    }

    Outcome broadcast(const Call& call, std::byte* x, std::size_t bytes, int root) {
        if (bytes <= sizeof(Note::data)) return pass_note(call, x, bytes, root);
        // Through the slots: the root copies while the others do, and they would stand in each other's way in its memory. What
        // one slot could hold goes in four pieces, so that this is so.
        const std::size_t slot = s_.layout().slot_bytes;
        const Shape shape{bytes, bytes <= slot && bytes > worth_cutting ? slot / 4 : slot, bytes, root, false};
        return exchange(
            call, shape, x, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                if (rank() != root) shown.copy(x + from, root, from, 0, size);
            });
    }

    // `counts`: bytes of each rank's part.
    Outcome all_gather(const Call& call, const std::byte* source, std::byte* target, const Lengths& counts) {
        return gather(call, source, target, counts, -1);
    }

    // On everybody with `root` -1; elsewhere `target` is not touched.
    Outcome gather(const Call& call, const std::byte* source, std::byte* target, const Lengths& counts, int root) {
        const std::size_t longest = counts.longest();
        const std::size_t mine = counts[rank()];
        // By address between two ranks only: with more of them an array is read several times, or one rank reads them all,
        // and each time it costs more than to copy it out of a slot.
        const Shape shape{longest, s_.layout().slot_bytes, longest, -1, ranks() == 2 && s_.copies_once(longest)};
        const bool receives = root < 0 || rank() == root;
        std::byte* own = receives ? target + counts.sum_before(rank()) : nullptr;
        bool own_done = false;
        return exchange(
            call, shape, source, [&](int r) { return counts[r]; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                // Tile by tile, so that what is read once is written twice.
                const std::size_t end = from + part(mine, from, size);
                for (std::size_t at = from; at < end; at += tile) {
                    copy(to + (at - from), source + at, std::min(tile, end - at));
                    if (receives) copy(own + at, source + at, std::min(tile, end - at));
                }
                own_done = true;
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                if (!receives) return;
                each_other([&](int r) {
                    const std::size_t count = part(counts[r], from, size);
                    shown.copy(target + counts.sum_before(r) + from, r, from, 0, count);
                });
                if (!own_done) copy(own + from, source + from, part(mine, from, size));
            });
    }

    // `source` on `root` only; without `target` this rank takes nothing.
    Outcome scatter(const Call& call, const std::byte* source, std::byte* target, const Lengths& counts, int root) {
        const std::size_t longest = counts.longest();
        const std::size_t total = counts.sum_before(ranks());
        const std::size_t region = region_bytes(1);
        const Shape shape{longest, region, ranks() * longest, root, parts_by_address(longest)};
        const std::size_t stride = std::min(region, longest);
        return exchange(
            call, shape, source, [total](int) { return total; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                std::size_t start = 0;
                for (int r = 0; r < ranks(); start += counts[r++])
                    if (r != root) copy(to + r * stride, source + start + from, part(counts[r], from, size));
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                const std::size_t start = counts.sum_before(rank()) + from;
                const std::size_t count = part(counts[rank()], from, size);
                if (target == nullptr) return;
                if (rank() == root)
                    copy(target + from, source + start, count);
                else
                    shown.copy(target + from, root, start, rank() * stride, count);
            });
    }

    // A scatter of equal parts whose length only the root knows: `tell_parts` shows it, with all the data of a short one, and
    // `take_part` takes this rank's.
    struct Parts {
        std::uint64_t bytes = 0;             // of each
        std::uint64_t kind = 0;              // a number for the type of their elements
        std::span<const std::byte> words{};  // what else the root says of them
    };
    static constexpr std::size_t most_words = 1024;

    // `source` and `parts` on `root` only.
    Outcome tell_parts(const Call& call, const std::byte* source, const Parts& parts, int root) {
        if (const Outcome late = catch_up(call); late != Outcome::done) return late;
        telling_ = {source, root, s_.step() + 1, parts};
        Line& line = s_.next_line();
        std::uint64_t home = 0;
        if (rank() == root) {
            const PartsHead head{parts.bytes, parts.kind, parts.words.size()};
            home = home_of(source, ranks() * parts.bytes, ranks() * parts.bytes, parts_by_address(parts.bytes));
            std::byte* to = in_line(parts) ? line.small + sizeof(PartsHead) : s_.slot(rank(), telling_.first);
            if (!resumes_) {
                std::memcpy(line.small, &head, sizeof(head));
                copy(s_.slot(rank(), telling_.first) + words_at(), parts.words.data(), parts.words.size());
                if (home == 0) show_parts(to, 0, parts_window());
            }
        }
        line.home.store(home, std::memory_order_relaxed);
        const Outcome outcome = meet(call);
        if (outcome != Outcome::done) return outcome;
        PartsHead head;
        std::memcpy(&head, s_.line_of(root, telling_.first).small, sizeof(head));
        const std::byte* words = s_.slot(root, telling_.first) + words_at();
        telling_.parts = {head.bytes, head.kind, {words, std::min<std::size_t>(head.words, most_words)}};
        return outcome;
    }

    // After `tell_parts`: what the root has said. The words stay there until `take_part`.
    const Parts& told() const noexcept { return telling_.parts; }

    // To `target`, which has the length that was told; nowhere if it is null.
    Outcome take_part(const Call& given, std::byte* target) {
        const Call call = once_met(given);
        const auto [source, root, first, parts] = telling_;
        if (parts.bytes == 0) return Outcome::done;
        const std::uint64_t total = ranks() * parts.bytes;
        const bool at_home = find_homes([total](int) { return total; }, root);
        const bool in_small = in_line(parts);
        const std::size_t window = at_home ? parts.bytes : parts_window();
        const std::size_t region = in_small ? sizeof(PartsHead) + rank() * parts.bytes : rank() * parts_window();
        const bool copies = rank() == root && !at_home;
        bool again = false;
        const Outcome outcome = take_turns(
            call, {first, parts.bytes, window, in_small, copies}, again,
            [&](std::byte* to, std::size_t from, std::size_t size) { show_parts(to, from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                if (target == nullptr) return;
                const std::size_t start = rank() * parts.bytes + from;
                if (rank() == root)
                    copy(target + from, source + start, size);
                else
                    shown.copy(target + from, root, start, region, size);
            });
        return again ? scatter(call, source, target, Lengths(parts.bytes), root) : outcome;
    }

    // `sizes`: bytes from rank i to rank j, row by row.
    Outcome all_to_all(const Call& call, const std::byte* source, std::byte* target, const Lengths& sizes) {
        const auto row = [&](int r) { return sizes.row(r, ranks()); };
        const std::size_t longest = sizes.longest();
        const std::size_t region = region_bytes(1);
        const std::size_t stride = std::min(region, longest);
        const Shape shape{longest, region, ranks() * longest, -1, parts_by_address(longest)};
        return exchange(
            call, shape, source, [&](int r) { return row(r).sum_before(ranks()); },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                std::size_t start = 0;
                for (int r = 0; r < ranks(); start += row(rank())[r++])
                    if (r != rank()) copy(to + r * stride, source + start + from, part(row(rank())[r], from, size));
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                const auto place = [&](int r) {
                    std::size_t before = 0;
                    for (int i = 0; i < r; ++i) before += row(i)[rank()];
                    return target + before + from;
                };
                each_other([&](int r) {
                    const std::size_t count = part(row(r)[rank()], from, size);
                    shown.copy(place(r), r, row(r).sum_before(rank()) + from, rank() * stride, count);
                });
                const std::byte* own = source + row(rank()).sum_before(rank()) + from;
                copy(place(rank()), own, part(row(rank())[rank()], from, size));
            });
    }

    // `source` has one part for each rank, `target` one.
    Outcome reduce_scatter(const Call& call, const std::byte* source, std::byte* target, std::size_t count,
                           const Combine& how) {
        const std::size_t item = item_size(how.dtype);
        const std::size_t bytes = count * item;
        const std::size_t region = region_bytes(item);
        const std::size_t stride = std::min(region, bytes);
        const Shape shape{bytes, region, ranks() * bytes, -1, false};
        return exchange(
            call, shape, source, [&](int) { return ranks() * bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                for (int r = 0; r < ranks(); ++r)
                    if (r != rank()) copy(to + r * stride, source + r * bytes + from, size);
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                sources_.resize(ranks());
                for (int r = 0; r < ranks(); ++r) {
                    const std::size_t start = rank() * bytes + from;
                    sources_[r] = r == rank() ? source + start : shown.at(r, start, rank() * stride);
                }
                combine(target + from, size, how);
            });
    }

    Outcome all_reduce(const Call& call, std::byte* x, std::size_t count, const Combine& how) {
        const std::size_t bytes = count * item_size(how.dtype);
        if (bytes > std::min(s_.thresholds().reduced_by_all, worth_reducing_at_home))
            return reduce_by_parts(call, x, count, how, -1);
        const Shape shape{bytes, s_.layout().slot_bytes, bytes, -1, false};
        return exchange(
            call, shape, x, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) { combine_shown(shown, x, from, size, how); });
    }

    // On `root`; elsewhere `x` stays as it is.
    Outcome reduce(const Call& call, std::byte* x, std::size_t count, const Combine& how, int root) {
        const std::size_t bytes = count * item_size(how.dtype);
        if (bytes > reduced_by_root) return reduce_by_parts(call, x, count, how, root);
        const Shape shape{bytes, s_.layout().slot_bytes, bytes, -1, false};
        return exchange(
            call, shape, x, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                if (rank() != root) copy(to, x + from, size);
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                if (rank() == root) combine_shown(shown, x, from, size, how);
            });
    }

private:
    static constexpr std::size_t tile = 16 << 10;  // stays in the first-level cache
    // Up to here the root of a reduction does all of it: half the steps are worth more than the others' help.
    static constexpr std::size_t reduced_by_root = 2 << 10;
    // Up to here an array is reduced by all even if it lies in a heap. No more than `worth_sharing`: nobody may read an array
    // where its owner writes the result meanwhile.
    static constexpr std::size_t worth_reducing_at_home = 16 << 10;
    // From here on what would fit into one slot is cut into pieces.
    static constexpr std::size_t worth_cutting = 512 << 10;
    // Up to here an array is copied even if it lies in a heap: that costs less than one more step.
    static constexpr std::size_t worth_sharing = 32 << 10;
    static_assert(std::max(worth_reducing_at_home, reduced_by_root) <= worth_sharing);

    // An operation in which each rank shows something (or only `root` does), and then everybody reads it.
    struct Shape {
        std::size_t longest;    // bytes of the longest part that one rank has for another
        std::size_t window;     // how much of each part goes into a slot at a time
        std::size_t footprint;  // bytes in a slot, if the parts are short enough for one piece
        int root;               // -1: everybody shows something
        bool by_address;        // whether arrays that lie elsewhere are read there
    };

    // What `tell_parts` shows in the root's line; short parts lie behind it.
    struct PartsHead {
        std::uint64_t bytes;
        std::uint64_t kind;
        std::uint64_t words;
    };
    struct Telling {
        const std::byte* source;
        int root;
        std::uint64_t first;
        Parts parts;
    };

    bool in_line(const Parts& parts) const noexcept {
        return parts.bytes <= (sizeof(Line::small) - sizeof(PartsHead)) / ranks();
    }
    // The words lie at the end of the first slot.
    std::size_t words_at() const noexcept { return s_.layout().slot_bytes - most_words; }
    std::size_t parts_window() const noexcept {
        const std::size_t region = words_at() / ranks() / cache_line * cache_line;
        return std::min<std::size_t>(region, telling_.parts.bytes);
    }
    void show_parts(std::byte* to, std::size_t from, std::size_t size) const noexcept {
        for (int r = 0; r < ranks(); ++r)
            if (r != rank()) copy(to + r * parts_window(), telling_.source + r * telling_.parts.bytes + from, size);
    }

    // Nothing may come from nowhere: an empty array need not have an address. Where the two meet, they are the same.
    static void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
        if (bytes > 0 && to != from) jitter::copy(to, from, bytes);
    }

    int rank() const noexcept { return s_.rank(); }
    int ranks() const noexcept { return s_.ranks(); }

    // Of a part that is `total` long: what lies in the window.
    static std::size_t part(std::size_t total, std::size_t from, std::size_t size) noexcept {
        return total > from ? std::min(size, total - from) : 0;
    }

    // A slot is cut into one region for each rank; each holds whole items, and begins on a cache line where it can.
    std::size_t region_bytes(std::size_t item) const noexcept {
        const std::size_t unit = std::max(cache_line, item);
        return s_.layout().slot_bytes / ranks() / unit * unit;
    }

    // Not everybody begins with the same rank's memory.
    template <class F>
    void each_other(F visit) const {
        for (int i = 1; i < ranks(); ++i) visit((rank() + i) % ranks());
    }

    void combine(std::byte* to, std::size_t bytes, const Combine& how) {
        jitter::step();
        reduce_many(to, sources_.data(), ranks(), bytes / item_size(how.dtype), how.dtype, how.op, how.divisor);
    }

    // After short broadcasts: nobody may be behind any more.
    Outcome catch_up(const Call& call) {
        if (!ahead_) return Outcome::done;
        const Outcome outcome = s_.wait(s_.step(), call.bound);
        if (outcome == Outcome::done) ahead_ = false;
        return outcome;
    }

    Outcome pass_note(const Call& call, std::byte* x, std::size_t bytes, int root) {
        if (s_.aborted()) return Outcome::aborted;
        const std::uint64_t step = s_.step() + 1;
        ahead_ = true;
        Note& note = s_.note(root, step);
        if (rank() == root) {
            if (step > notes) {
                const Outcome outcome = s_.wait(step - notes, call.bound);
                if (outcome != Outcome::done) return outcome;
            }
            if (const int other = s_.claim_root(step); other >= 0) return mismatch(step, other);
            note.fingerprint.store(shown_fingerprint(call), std::memory_order_relaxed);
            copy(note.data, x, bytes);
            s_.hurry();
            shown_ = step;
            // Who gave this broadcast up before it was shown has told the others so.
            if (const Outcome outcome = s_.may_take(step); outcome != Outcome::done) return outcome;
        } else {
            const std::uint64_t fingerprint = shown_fingerprint(call);
            Note& mine = s_.note(rank(), step);
            mine.wanted.store(fingerprint, std::memory_order_relaxed);
            mine.wanted_at.store(step, std::memory_order_seq_cst);
            s_.wake_sleepers();
            const auto waits_itself = [&] {  // for another root, or in another broadcast
                return note.wanted_at.load(std::memory_order_seq_cst) == step &&
                       note.wanted.load(std::memory_order_relaxed) != fingerprint;
            };
            const Outcome outcome = s_.wait_for(root, step, call.bound, waits_itself);
            if (outcome != Outcome::done && outcome != Outcome::broken) return outcome;
            if (!s_.reached(root, step) || note.fingerprint.load(std::memory_order_relaxed) != fingerprint)
                return mismatch(step, root);
            if (outcome == Outcome::broken) return outcome;
            copy(x, note.data, bytes);
            s_.arrive();
        }
        passed_ = mix(passed_ ^ call.fingerprint);
        return Outcome::done;
    }

    // The fingerprint, and that of the short broadcasts before.
    std::uint64_t shown_fingerprint(const Call& call) const noexcept {
        return passed_ == 0 ? call.fingerprint : mix(passed_ ^ mix(call.fingerprint));
    }

    // Another rank is in another operation: nobody may succeed in this one.
    Outcome mismatch(std::uint64_t step, int culprit) noexcept {
        culprit_ = culprit;
        s_.give_up(step);
        return Outcome::mismatch;
    }

    // Takes the operation's first step and waits for everybody; only then is anything of theirs looked at.
    Outcome meet(const Call& call) {
        // Before it is taken: others must not take this rank for one that came.
        Outcome outcome = s_.may_take(s_.step() + 1);
        if (outcome != Outcome::done) return outcome;
        const std::uint64_t fingerprint = shown_fingerprint(call);
        s_.next_line().fingerprint.store(fingerprint, std::memory_order_relaxed);
        s_.arrive();
        outcome = s_.wait(s_.step(), call.bound);
        resumes_ = outcome == Outcome::interrupted && call.bound.resumable;
        if (resumes_) s_.step_back();
        if (outcome != Outcome::done && outcome != Outcome::broken) return outcome;
        // All have come: where their operations differ, each can say so itself, also if another was the first to see it.
        for (int r = 0; r < ranks(); ++r)
            if (s_.line_of(r, s_.step()).fingerprint.load(std::memory_order_relaxed) != fingerprint)
                return mismatch(s_.step(), r);
        if (outcome == Outcome::done) passed_ = shown_ = 0;
        return outcome;
    }

    // For what follows the meeting.
    static Call once_met(const Call& call) noexcept {
        Call rest = call;
        if (rest.bound.resumable) rest.bound.interrupted = nullptr;
        rest.bound.resumable = false;
        return rest;
    }

    // After the first step: whose arrays can be read where they lie. True if all that matter can.
    template <class Bytes>
    bool find_homes(Bytes bytes_of, int root) {
        bool all = true;
        for (int r = 0; r < ranks(); ++r) {
            const std::uint64_t home = s_.line_of(r, s_.step()).home.load(std::memory_order_relaxed);
            addresses_[r] = s_.reads_peers() && Segment::is_address(home) ? home : 0;
            homes_[r] = home != 0 && addresses_[r] == 0 ? s_.at(r, home, bytes_of(r)) : nullptr;
            if (homes_[r] == nullptr && addresses_[r] == 0 && (root < 0 || r == root)) all = false;
        }
        return all;
    }

    bool any_home() const noexcept {
        for (int r = 0; r < ranks(); ++r)
            if (homes_[r] != nullptr || addresses_[r] != 0) return true;
        return false;
    }

    // Where an array that this rank shows can be read by the others; 0 if it has to be copied into a slot.
    std::uint64_t home_of(const std::byte* array, std::size_t bytes, std::size_t footprint, bool by_address) const noexcept {
        const std::uint64_t offset = footprint > worth_sharing ? s_.offset_of(array, bytes) : 0;
        return offset == 0 && by_address ? Segment::address_of(array) : offset;
    }

    // Whether parts of this length, one for each rank, are read from the memory of the rank that has them. More than two ranks
    // may have to share cores, and then one step more is dear: all parts together have to be long.
    bool parts_by_address(std::size_t each) const noexcept {
        return s_.copies_once(each) && (ranks() == 2 || s_.copies_once(ranks() * each / 12));
    }

    // One piece of what the others show.
    class Shown {
    public:
        Shown(Collectives& ops, std::uint64_t first, std::uint64_t piece, bool in_line) noexcept
            : ops_(ops), first_(first), piece_(piece), in_line_(in_line) {}

        // Where rank r's lies in the segment: `place` in its array, `region` in its slot.
        const std::byte* at(int r, std::size_t place, std::size_t region) const noexcept {
            if (ops_.homes_[r] != nullptr) return ops_.homes_[r] + place;
            return (in_line_ ? ops_.s_.line_of(r, first_).small : ops_.s_.slot(r, first_ + piece_)) + region;
        }

        void copy(std::byte* to, int r, std::size_t place, std::size_t region, std::size_t bytes) const noexcept {
            if (ops_.addresses_[r] == 0)
                Collectives::copy(to, at(r, place, region), bytes);
            else if (!ops_.s_.read(r, to, ops_.addresses_[r] + place, bytes))
                ops_.unread_ = true;
        }

    private:
        Collectives& ops_;
        std::uint64_t first_, piece_;
        bool in_line_;
    };

    // Everybody's, one after another, into this rank's own array.
    void combine_shown(const Shown& shown, std::byte* x, std::size_t from, std::size_t size, const Combine& how) {
        sources_.resize(ranks());
        for (int r = 0; r < ranks(); ++r) sources_[r] = r == rank() ? x + from : shown.at(r, from, 0);
        combine(x + from, size, how);
    }

    // `publish(to, from, size)` writes the window [from, from + size) of what this rank shows. `consume(shown, from,
    // size)` reads it.
    template <class Bytes, class Publish, class Consume>
    Outcome exchange(const Call& call, const Shape& shape, const std::byte* mine, Bytes bytes_of, Publish publish,
                     Consume consume) {
        if (const Outcome late = catch_up(call); late != Outcome::done) return late;
        const bool shows = shape.root < 0 || shape.root == rank();
        const bool in_line = shape.footprint <= sizeof(Line::small);
        const std::uint64_t first = s_.step() + 1;
        Line& line = s_.next_line();
        const std::uint64_t home = shows ? home_of(mine, bytes_of(rank()), shape.footprint, shape.by_address) : 0;
        line.home.store(home, std::memory_order_relaxed);
        const bool copies = shows && home == 0;
        std::size_t window = std::min(shape.window, shape.longest);
        if (copies && window > 0 && !resumes_) publish(in_line ? line.small : s_.slot(rank(), first), 0, window);
        Outcome outcome = meet(call);
        if (outcome != Outcome::done || shape.longest == 0) return outcome;
        if (find_homes(bytes_of, shape.root)) window = shape.longest;
        bool again = false;
        const Call rest = once_met(call);
        outcome = take_turns(rest, {first, shape.longest, window, in_line, copies}, again, publish, consume);
        if (!again) return outcome;
        Shape through_slots = shape;
        through_slots.by_address = false;
        return exchange(rest, through_slots, mine, bytes_of, publish, consume);
    }

    // What is left of an operation once all have met, and have shown its first piece.
    struct Rest {
        std::uint64_t first;  // the step at which they have
        std::size_t longest;
        std::size_t window;
        bool in_line;
        bool copies;  // whether this rank writes the other pieces into its slots
    };

    // `again`: whether all have to do the operation once more, because one could not read another's memory.
    template <class Publish, class Consume>
    Outcome take_turns(const Call& call, const Rest& rest, bool& again, Publish publish, Consume consume) {
        const auto [first, longest, window, in_line, copies] = rest;
        unread_ = false;
        const bool shared = any_home();
        const auto read = [&, this](std::uint64_t piece) {
            const std::size_t from = piece * window;
            consume(Shown(*this, first, piece, in_line), from, std::min(window, longest - from));
        };
        std::uint64_t piece = 1;
        Outcome outcome = Outcome::done;
        for (; piece * window < longest; ++piece) {
            const std::size_t from = piece * window;
            if (copies) publish(s_.slot(rank(), first + piece), from, std::min(window, longest - from));
            s_.arrive();
            outcome = s_.wait(first + piece - 1, call.bound);
            if (outcome != Outcome::done) return outcome;
            read(piece - 1);
        }
        outcome = s_.wait(first + piece - 1, call.bound);
        if (outcome != Outcome::done) return outcome;
        read(piece - 1);
        if (!shared) return Outcome::done;
        s_.next_line().home.store(unread_ ? 1 : 0, std::memory_order_relaxed);
        s_.arrive();  // whose array was read where it lies may change it once everybody has done so
        outcome = s_.wait(s_.step(), call.bound);
        if (outcome != Outcome::done) return outcome;
        for (int r = 0; r < ranks(); ++r)
            if (s_.line_of(r, s_.step()).home.load(std::memory_order_relaxed) != 0) again = true;
        if (again) s_.read_peers(false);
        return outcome;
    }

    // Each rank reduces one part of every piece and writes the result to all (or to `root`), into the slot or the heap
    // that it read from. So a rank copies out only what others need, takes its own part from its own array, and copies
    // in only what others reduced.
    //
    // What is short, and lies in no rank's heap, is reduced by all: that saves a step, and they know once they have met.
    //
    // Piece k lies in slot first + k, and only its owner copies out of that slot, after everybody is done with it. The
    // owner writes piece k + 1 once it has taken piece k - 2 out: three slots would do.
    Outcome reduce_by_parts(const Call& given, std::byte* x, std::size_t count, const Combine& how, int root) {
        if (const Outcome late = catch_up(given); late != Outcome::done) return late;
        const std::size_t item = item_size(how.dtype);
        const std::uint64_t first = s_.step() + 1;
        const std::uint64_t offset = s_.offset_of(x, count * item);
        const bool receives = root < 0 || root == rank();
        std::size_t length = std::min(count, s_.layout().slot_bytes / item);  // elements of a piece
        const bool is_short = root < 0 && length == count && count * item <= s_.thresholds().reduced_by_all;

        const auto piece_count = [&](std::uint64_t k) { return std::min(length, count - k * length); };
        // Elements [first, second) of a piece that a rank reduces; parts begin on cache lines.
        const auto bounds = [&](std::size_t elements, int r) {
            const std::size_t unit = std::max<std::size_t>(1, cache_line / item);
            const std::size_t each = (elements + ranks() * unit - 1) / (ranks() * unit) * unit;
            return std::pair(std::min(r * each, elements), std::min((r + 1) * each, elements));
        };
        // Between array and slot, without this rank's own part.
        const auto copy_others = [&](std::byte* to, const std::byte* from, std::size_t elements) {
            const auto [low, high] = bounds(elements, rank());
            copy(to, from, low * item);
            copy(to + high * item, from + high * item, (elements - high) * item);
        };
        const auto publish = [&](std::uint64_t k) {
            if (offset != 0) return;
            if (is_short) return copy(s_.slot(rank(), first), x, count * item);
            copy_others(s_.slot(rank(), first + k), x + k * length * item, piece_count(k));
        };
        const auto take_out = [&](std::uint64_t k) {
            if (offset == 0 && receives)
                copy_others(x + k * length * item, s_.slot(rank(), first + k), piece_count(k));
        };

        if (count > 0 && !resumes_) publish(0);
        s_.next_line().home.store(offset, std::memory_order_relaxed);
        Outcome outcome = meet(given);
        if (outcome != Outcome::done || count == 0) return outcome;
        const Call call = once_met(given);
        if (find_homes([&](int) { return count * item; }, -1)) length = count;
        if (is_short && !any_home()) {
            combine_shown(Shown(*this, first, 0, false), x, 0, count * item, how);
            return Outcome::done;
        }
        const std::uint64_t pieces = (count + length - 1) / length;
        std::uint64_t shown = s_.step();  // the step at which everybody has shown the piece
        std::uint64_t reduced = 0;        // and the one at which everybody had reduced the piece before
        for (std::uint64_t k = 0; k < pieces; ++k) {
            std::uint64_t next_shown = 0;
            if (k + 1 < pieces) {
                publish(k + 1);
                s_.arrive();
                next_shown = s_.step();
            }
            if ((outcome = s_.wait(shown, call.bound)) != Outcome::done) return outcome;
            const auto [low, high] = bounds(piece_count(k), rank());
            const auto place = [&](int r) {
                if (r == rank()) return x + k * length * item;
                return homes_[r] != nullptr ? homes_[r] + k * length * item : s_.slot(r, first + k);
            };
            reduce_part(place, low * item, high * item, how, root);
            s_.arrive();
            const std::uint64_t now_reduced = s_.step();
            if (k > 0) {
                if ((outcome = s_.wait(reduced, call.bound)) != Outcome::done) return outcome;
                take_out(k - 1);
            }
            shown = next_shown;
            reduced = now_reduced;
        }
        if ((outcome = s_.wait(reduced, call.bound)) != Outcome::done) return outcome;
        take_out(pieces - 1);
        return Outcome::done;
    }

    // Tile by tile, so that the result is copied to the others while it is in the cache.
    template <class Place>
    void reduce_part(Place place, std::size_t begin, std::size_t end, const Combine& how, int root) {
        sources_.resize(ranks());
        for (std::size_t at = begin; at < end; at += tile) {
            const std::size_t bytes = std::min(tile, end - at);
            for (int r = 0; r < ranks(); ++r) sources_[r] = place(r) + at;
            std::byte* to = place(root < 0 ? rank() : root) + at;
            combine(to, bytes, how);
            if (root < 0) each_other([&](int r) { copy(place(r) + at, to, bytes); });
        }
    }

    Segment& s_;
    int culprit_ = -1;
    bool ahead_ = false;        // a short broadcast was the last operation: others may be behind
    std::uint64_t passed_ = 0;  // the fingerprints of those since all have met
    std::uint64_t shown_ = 0;   // the step of the last of them that this rank was the root of
    bool resumes_ = false;      // the next operation was interrupted before: it has shown all it has to show
    Telling telling_{nullptr, 0, 0, {}};  // the scatter under way
    std::vector<std::byte*> homes_;           // arrays in heaps; null for others
    std::vector<std::uint64_t> addresses_;    // arrays in the memory of processes; 0 for others
    bool unread_ = false;                     // this rank could not read one of them
    std::vector<const std::byte*> sources_;
};

}  // namespace phalanx
