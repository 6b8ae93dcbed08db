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
// An operation that goes from a root to all others, or from them to a root, is the exception: there nobody waits who only
// shows something (one_way.hpp). Before any other operation a rank waits until all have caught up, so that the above holds.
//
// An operation that is interrupted while it waits for the others at its first step may run again, in another thread. It takes
// the same step again, and writes nothing anew: the others may be reading it.
//
// An array in the rank's heap is not copied: the others read it where it lies. So they do with a long array that lies
// elsewhere, where that is quicker and all can (peer_memory.hpp), with threads that help if there are cores to spare (haul.hpp).
// A sum is then read tile by tile (`reduce_far`). Nobody goes on before all have read. At that last step each rank says whether
// it could. If one could not, all do the operation once more through the slots, and from then on all operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "crew.hpp"
#include "fingerprint.hpp"
#include "haul.hpp"
#include "jitter.hpp"
#include "one_way.hpp"
#include "reduce.hpp"
#include "segment.hpp"
#include "stream_copy.hpp"

namespace phalanx {

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

// Memory with one part for each rank: an array, or an address for each part.
template <class Byte>
class Areas {
public:
    Areas(Byte* whole) noexcept : whole_(whole) {}
    static Areas apart(Byte* const* each) noexcept {
        Areas areas(nullptr);
        areas.each_ = each;
        return areas;
    }

    // Rank r's part, which begins at `start` of an array.
    Byte* part(int r, std::size_t start) const noexcept { return each_ != nullptr ? each_[r] : whole_ + start; }
    // Null if the parts lie apart.
    Byte* whole() const noexcept { return whole_; }

private:
    Byte* whole_;
    Byte* const* each_ = nullptr;
};
using Sources = Areas<const std::byte>;
using Targets = Areas<std::byte>;

class Collectives {
public:
    explicit Collectives(Segment& segment)
        : s_(segment),
          one_way_(segment),
          crew_(segment.thresholds().helpers),
          haul_(segment, crew_),
          homes_(segment.ranks()),
          addresses_(segment.ranks()),
          scratch_(static_cast<std::size_t>(crew_.helpers()) + 1) {}

    int culprit() const noexcept { return one_way_.culprit(); }  // after a mismatch: a rank that is in another operation

    // The ranks that an operation failed because of.
    std::vector<int> blamed(Outcome outcome) const {
        if (outcome == Outcome::timed_out) return s_.missing();
        if (outcome == Outcome::mismatch) return {culprit()};
        if (outcome == Outcome::left) return {s_.leaver()};
        if (outcome == Outcome::broken) return {s_.breaker()};
        return {};
    }

    // Before the group is closed: waits until everybody has taken part in what this rank has shown last without waiting for
    // them, or will not.
    Outcome flush(const Bound& bound) { return one_way_.flush(bound); }

    // There will be no more operations: helpers need not wait for any.
    void dismiss() noexcept { crew_.dismiss(); }

    Outcome barrier(const Call& call) {
        if (const Outcome late = one_way_.catch_up(call); late != Outcome::done) return late;
        s_.next_line().home.store(0, std::memory_order_relaxed);
        return meet(call);
    }

    Outcome broadcast(const Call& call, std::byte* x, std::size_t bytes, int root) {
        Way way = way_of(root, bytes);
        // The root copies while the others do. What one slot could hold goes in several pieces, so that this is so.
        const std::size_t slot = s_.layout().slot_bytes;
        if (bytes <= slot && bytes > worth_cutting) way.window = std::min(slot / 4, std::max(window_bytes(), least_broadcast_window));
        if (rank() == root) way.home = home_of(x, bytes, bytes, broadcasts_by_address(bytes));
        way.shares_slot = fits_share(way, bytes);
        return pass(
            call, way, {x, bytes}, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) { shown.copy(x + from, root, from, 0, size); });
    }

    // `counts`: bytes of each rank's part.
    Outcome all_gather(const Call& call, const std::byte* source, const Targets& target, const Lengths& counts) {
        const std::size_t longest = counts.longest();
        const std::size_t mine = counts[rank()];
        const bool in_pieces = !has_helpers() && longest >= s_.thresholds().all_gather_in_pieces_from;
        const Shape shape{longest, window_bytes(), longest, gathers_by_address(longest) && !in_pieces};
        std::byte* own = target.part(rank(), counts.sum_before(rank()));
        bool own_done = false;
        return exchange(
            call, shape, source, [&](int r) { return counts[r]; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                // Tile by tile, so that what is read once is written twice.
                const std::size_t end = from + part(mine, from, size);
                for (std::size_t at = from; at < end; at += tile) {
                    copy(to + (at - from), source + at, std::min(tile, end - at));
                    copy(own + at, source + at, std::min(tile, end - at));
                }
                own_done = true;
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                take_others(shown, target, counts, from, size);
                if (!own_done) copy_own(own + from, source + from, part(mine, from, size), mine);
            });
    }

    // To `root`; elsewhere `target` is not touched.
    Outcome gather(const Call& call, const std::byte* source, const Targets& target, const Lengths& counts, int root) {
        const std::size_t longest = counts.longest();
        const std::size_t mine = counts[rank()];
        Way way = way_of(root, longest);
        way.to_root = true;
        way.window = std::min(way.window, window_bytes());
        const bool in_pieces = !has_helpers() && longest >= s_.thresholds().gather_in_pieces_from;
        if (rank() != root) way.home = home_of(source, mine, mine, gathers_by_address(longest) && !in_pieces);
        way.shares_slot = fits_share(way, longest);
        return pass(
            call, way, {source, mine}, [&](int r) { return counts[r]; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, source + from, part(mine, from, size)); },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                take_others(shown, target, counts, from, size, worth_streaming_shown);
                std::byte* const own = target.part(rank(), counts.sum_before(rank())) + from;
                copy_own(own, source + from, part(mine, from, size), mine);
            });
    }

    // `source` on `root` only.
    Outcome scatter(const Call& call, const std::byte* source, std::byte* target, const Lengths& counts, int root) {
        const std::size_t longest = counts.longest();
        Way way = way_of(root, longest);
        way.in_note = ranks() * longest <= sizeof(Note::data);
        way.window = std::min(region_bytes(1), longest);
        const std::size_t total = counts.sum_before(ranks());
        if (rank() == root) way.home = home_of(source, total, total, parts_by_address(longest));
        way.shares_slot = fits_share(way, ranks() * longest);
        const auto take_own = [&] { copy_at_once(target, source + counts.sum_before(root), counts[root]); };
        const Outcome outcome = pass(
            call, way, {source, total}, [total](int) { return total; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                std::size_t start = 0;
                for (int r = 0; r < ranks(); start += counts[r++])
                    if (r != root) copy(to + r * way.window, source + start + from, part(counts[r], from, size));
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                const std::size_t start = counts.sum_before(rank()) + from;
                shown.copy(target + from, root, start, rank() * way.window, part(counts[rank()], from, size));
            },
            take_own);
        if (outcome == Outcome::done && rank() == root && way.home == 0) take_own();
        return outcome;
    }

    // A scatter of equal parts whose length only the root knows: `tell_parts` shows it, with all the data of a short one, and
    // `take_part` takes this rank's.
    enum class Where : std::uint16_t {
        shown,            // in the segment, or where the others can read them
        shown_and_asked,  // the same, and the root asks whether all ranks could take them on a GPU: each answers afterwards
        on_gpu            // on the root's GPU, and not shown: phalanx/cuda/collectives.hpp moves them
    };
    struct Parts {
        std::uint64_t bytes = 0;             // of each
        std::uint64_t kind = 0;              // a number for the type of their elements
        std::span<const std::byte> words{};  // what else the root says of them
        Where where = Where::shown;

        std::size_t shown_bytes() const noexcept { return where == Where::on_gpu ? 0 : bytes; }
    };
    static constexpr std::size_t most_words = OneWay::most_words;

    // `source` and `parts` on `root` only.
    Outcome tell_parts(const Call& call, const Sources& source, const Parts& parts, int root) {
        if (rank() != root) {
            const Outcome outcome = one_way_.begin_reading(call, root, false);
            if (outcome == Outcome::done) hear_parts(root);
            return outcome;
        }
        const std::size_t total = ranks() * parts.shown_bytes();
        const bool in_note = sizeof(PartsHead) + total + parts.words.size() <= sizeof(Note::data);
        telling_ = {source, parts, parts_way(root, parts.shown_bytes(), in_note)};
        Way& way = telling_.way;
        way.shares_slot = !in_note && total + parts.words.size() <= s_.share_bytes() / 2;
        way.at_readers = !in_note && !way.shares_slot && parts_at_readers(parts.shown_bytes());
        if (way.at_readers) way.window = parts.bytes;
        if (!way.in_note && !way.shares_slot && !way.at_readers && total > 0)
            way.home = home_of(source.whole(), total, total, parts_by_address(parts.bytes));
        if (Segment::is_address(way.home)) way.in_slot = parts_in_slot(parts.bytes);
        return one_way_.begin_showing(call, way, [&](Note& note, std::byte* slot) {
            const PartsHead head{parts.bytes,  parts.kind, static_cast<std::uint16_t>(parts.words.size()), parts.where, way.in_note,
                                 way.at_readers, static_cast<std::uint8_t>(way.in_slot), way.shares_slot};
            std::memcpy(note.data, &head, sizeof(head));
            std::byte* const data = way.in_note ? note.data + sizeof(head) : slot;
            if (way.at_readers)
                show_parts_at_readers();
            else if (way.home == 0)
                show_parts(data, 0);
            std::byte* const words = way.in_note || way.shares_slot ? data + total : slot + words_at();
            copy(words, parts.words.data(), parts.words.size());
        });
    }

    // After `tell_parts`: what the root has said. The words stay there until `take_part`.
    const Parts& told() const noexcept { return telling_.parts; }

    // To `target`, which has the length that was told; nowhere if it is null, as it must be for parts that were not shown.
    Outcome take_part(const Call& given, std::byte* target) {
        const Call call = given.once_met();
        const auto& [source, parts, way] = telling_;
        const std::size_t start = rank() * parts.bytes;
        if (rank() == way.root) {
            if (way.in_slot > 0) {
                const Outcome outcome = one_way_.show_next(call, [&](std::byte* slot) { show_parts_in_slot(slot); });
                if (outcome != Outcome::done) return outcome;
            }
            if (target != nullptr) copy_at_once(target, source.part(rank(), start), parts.bytes);
            return one_way_.go_on_showing(call, way, {source.whole(), way.home != 0 ? ranks() * parts.bytes : 0},
                                          [&](std::byte* to, std::uint64_t piece) { show_parts(to, piece); });
        }
        if (way.mine_in_slot)
            return read_pieces(
                call, way, [&](int) { return ranks() * parts.bytes; },
                [&](const Shown& shown, std::size_t from, std::size_t) {
                    const std::size_t region = static_cast<std::size_t>(after(way.root) - 1) * parts.bytes;
                    if (from > 0 && target != nullptr) shown.copy(target, way.root, start, region, parts.bytes);
                });
        const std::size_t region = (way.at_readers ? 0 : rank() * way.window) + (way.in_note ? sizeof(PartsHead) : 0);
        return read_pieces(
            call, way, [&](int) { return ranks() * parts.bytes; },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                if (target != nullptr) shown.copy(target + from, way.root, start + from, region, size);
            });
    }

    // `sizes`: bytes from rank i to rank j, row by row.
    Outcome all_to_all(const Call& call, const Sources& source, const Targets& target, const Lengths& sizes) {
        const auto row = [&](int r) { return sizes.row(r, ranks()); };
        const std::size_t longest = sizes.longest();
        const std::size_t region = std::min(region_bytes(1), window_bytes());
        const std::size_t stride = std::min(region, longest);
        const Shape shape{longest, region, ranks() * longest, all_parts_by_address(longest)};
        return exchange(
            call, shape, source.whole(), [&](int r) { return row(r).sum_before(ranks()); },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                std::size_t start = 0;
                for (int r = 0; r < ranks(); start += row(rank())[r++])
                    if (r != rank()) copy(to + r * stride, source.part(r, start) + from, part(row(rank())[r], from, size));
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                const auto place = [&](int r) {
                    std::size_t before = 0;
                    for (int i = 0; i < r; ++i) before += row(i)[rank()];
                    return target.part(r, before) + from;
                };
                each_other([&](int r) {
                    const std::size_t count = part(row(r)[rank()], from, size);
                    shown.copy(place(r), r, row(r).sum_before(rank()) + from, rank() * stride, count);
                });
                const std::byte* own = source.part(rank(), row(rank()).sum_before(rank())) + from;
                const std::size_t whole = row(rank())[rank()];
                copy_own(place(rank()), own, part(whole, from, size), whole);
            });
    }

    // `source` has one part for each rank, `target` one.
    Outcome reduce_scatter(const Call& call, const Sources& source, std::byte* target, std::size_t count,
                           const Combine& how) {
        const std::size_t item = item_size(how.dtype);
        const std::size_t bytes = count * item;
        const std::size_t region = region_bytes(item);
        const std::size_t stride = std::min(region, bytes);
        // What is read where it lies may have to be done once more. Then this rank's part must be what it was, and a result in the
        // place of it would be added to itself.
        const bool far = is_helped(ranks() * bytes);
        const std::byte* own = source.part(rank(), rank() * bytes);
        std::vector<std::byte> kept;
        if (far && target < own + bytes && own < target + bytes) {
            kept.assign(own, own + bytes);
            own = kept.data();
        }
        const Shape shape{bytes, region, ranks() * bytes, far};
        return exchange(
            call, shape, source.whole(), [&](int) { return ranks() * bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) {
                for (int r = 0; r < ranks(); ++r)
                    if (r != rank()) copy(to + r * stride, source.part(r, r * bytes) + from, size);
            },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                const std::size_t start = rank() * bytes + from;
                const auto near = [&](int r) { return r == rank() ? own + from : shown.near(r, start, rank() * stride); };
                if (!combine_near_and_far(target + from, near, start, size, how)) unread_ = true;
            });
    }

    Outcome all_reduce(const Call& call, std::byte* x, std::size_t count, const Combine& how) {
        const std::size_t bytes = count * item_size(how.dtype);
        if (bytes > std::min(s_.thresholds().reduced_by_all, worth_reducing_at_home))
            return reduce_by_parts(call, x, count, how, -1);
        const Shape shape{bytes, s_.layout().slot_bytes, bytes, false};
        return exchange(
            call, shape, x, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) { combine_shown(shown, x, from, size, how); });
    }

    // On `root`; elsewhere `x` stays as it is.
    Outcome reduce(const Call& call, std::byte* x, std::size_t count, const Combine& how, int root) {
        const std::size_t bytes = count * item_size(how.dtype);
        if (bytes > reduced_by_root) return reduce_by_parts(call, x, count, how, root);
        Way way = way_of(root, bytes);
        way.to_root = true;
        way.shares_slot = fits_share(way, bytes);
        return pass(
            call, way, {}, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) { combine_shown(shown, x, from, size, how); });
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
    static constexpr std::size_t cached_window = 128 << 10;
    // From here on several ranks read the parts of a scatter where they lie.
    static constexpr std::size_t worth_reading_parts = 512 << 10;
    // Up to here the root of a scatter copies parts into the slots of those who read them, where ranks share cores.
    static constexpr std::size_t most_at_readers = 128 << 10;
    // A sum has to be so many times longer than a copy for threads to help with it: each rank reads twice, and waits in between.
    static constexpr std::size_t worth_helping_sums = 4;
    // From here on NumPy asks for large pages.
    static constexpr std::size_t in_large_pages = 4 << 20;
#if defined(__x86_64__)
    // From here on a copy that only this rank reads bypasses the caches.
    static constexpr std::size_t worth_streaming = 512 << 10;
    static constexpr std::size_t least_broadcast_window = cached_window;
#else
    static constexpr std::size_t worth_streaming = SIZE_MAX;  // it was never quicker
    static constexpr std::size_t least_broadcast_window = SIZE_MAX;  // nor were shorter pieces
#endif
    // The same for what another rank has just written, and the caches have.
    static constexpr std::size_t worth_streaming_shown = 2 << 20;
    static_assert(std::max(worth_reducing_at_home, reduced_by_root) <= worth_sharing);

    // An operation in which each rank shows something, and then everybody reads it.
    struct Shape {
        std::size_t longest;    // bytes of the longest part that one rank has for another
        std::size_t window;     // how much of each part goes into a slot at a time
        std::size_t footprint;  // bytes in a slot, if the parts are short enough for one piece
        bool by_address;        // whether arrays that lie elsewhere are read there
    };

    // What `tell_parts` shows in the root's note. Short parts and words lie behind it, others in the slot or a share of it.
    struct PartsHead {
        std::uint64_t bytes;
        std::uint64_t kind;
        std::uint16_t words;
        Where where;
        std::uint8_t in_note;
        std::uint8_t at_readers;
        std::uint8_t in_slot;
        std::uint8_t shares_slot;
    };
    static_assert(most_words <= UINT16_MAX);
    static constexpr std::size_t most_parts_in_slot = UINT8_MAX;
    struct Telling {
        Sources source = nullptr;
        Parts parts;
        Way way;
    };

    // The words lie at the end of the first slot.
    std::size_t words_at() const noexcept { return s_.layout().slot_bytes - most_words; }
    Way parts_way(int root, std::size_t bytes, bool in_note) const noexcept {
        const std::size_t region = words_at() / ranks() / cache_line * cache_line;
        return {root, false, bytes, in_note ? bytes : std::min(region, bytes), in_note, 0};
    }
    void show_parts(std::byte* to, std::uint64_t piece) const noexcept {
        const auto& [source, parts, way] = telling_;
        const std::size_t from = piece * way.window;
        for (int r = 0; r < ranks(); ++r)
            if (r != rank()) copy(to + r * way.window, source.part(r, r * parts.bytes) + from, way.size(piece));
    }
    void show_parts_at_readers() const noexcept {
        const auto& [source, parts, way] = telling_;
        each_other([&](int r) { copy(s_.slot(r, s_.step() + 1), source.part(r, r * parts.bytes), parts.bytes); });
    }
    void show_parts_in_slot(std::byte* to) const noexcept {
        const auto& [source, parts, way] = telling_;
        for (int i = 1; i <= way.in_slot; ++i) {
            const int r = (rank() + i) % ranks();
            copy(to + (i - 1) * parts.bytes, source.part(r, r * parts.bytes), parts.bytes);
        }
    }
    void hear_parts(int root) noexcept {
        const Note& note = one_way_.shown_by(root);
        PartsHead head;
        std::memcpy(&head, note.data, sizeof(head));
        Parts parts{head.bytes, head.kind, {}, head.where};
        const std::size_t total = ranks() * parts.shown_bytes();
        // What was read from shared memory is not trusted: the sum could have wrapped around.
        const bool has_room = parts.shown_bytes() <= s_.share_bytes() / ranks() && total + head.words <= s_.share_bytes();
        const bool shares_slot = head.shares_slot != 0 && has_room;
        const std::byte* words = head.in_note != 0 ? note.data + sizeof(head) + total
                                 : shares_slot     ? s_.share_of_slot(root, one_way_.first()) + total
                                                   : s_.slot(root, one_way_.first()) + words_at();
        parts.words = {words, std::min<std::size_t>(head.words, most_words)};
        telling_ = {nullptr, parts, parts_way(root, parts.shown_bytes(), head.in_note != 0)};
        telling_.way.shares_slot = shares_slot;
        telling_.way.in_slot = head.in_slot;
        telling_.way.at_readers = head.at_readers != 0;
        if (telling_.way.at_readers) telling_.way.window = std::min<std::size_t>(parts.bytes, s_.layout().slot_bytes);
        // What was read from shared memory is not trusted.
        const bool fits = parts.bytes <= s_.layout().slot_bytes / static_cast<std::size_t>(after(root));
        telling_.way.mine_in_slot = after(root) <= head.in_slot && fits;
    }
    // How many ranks after the root this one comes.
    int after(int root) const noexcept { return (rank() - root + ranks()) % ranks(); }

    // Nothing may come from nowhere: an empty array need not have an address. Where the two meet, they are the same.
    static void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
        if (bytes > 0 && to != from) jitter::copy(to, from, bytes);
    }

    // Of an array that is `whole` long, and that nobody else reads: a long one would push everything else out of the caches.
    static void copy_long(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t whole,
                          std::size_t streams_from = worth_streaming) noexcept {
        if (bypasses(whole, streams_from) && to != from)
            stream_copy(to, from, bytes);
        else
            copy(to, from, bytes);
    }
    static bool bypasses(std::size_t whole, std::size_t streams_from = worth_streaming) noexcept {
        return whole >= std::max(streams_from, worth_streaming);
    }

    // This rank's own part, after those of the others were named: at once, or together with theirs.
    void copy_own(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t whole) {
        if (haul_.empty())
            copy_long(to, from, bytes, whole);
        else
            haul_.copy(to, from, bytes, bypasses(whole));
    }
    // The same by itself.
    void copy_at_once(std::byte* to, const std::byte* from, std::size_t bytes) {
        if (!is_helped(bytes)) return copy_long(to, from, bytes, bytes);
        haul_.copy(to, from, bytes, bypasses(bytes));
        haul_.carry_out([](const Load&) {});
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

    // How much of what each rank has for all goes at a time. Two ranks that do not wait for a core keep step at little cost, and
    // so few bytes are still in the caches when the other reads them.
    std::size_t window_bytes() const noexcept {
        const std::size_t slot = s_.layout().slot_bytes;
        return ranks() == 2 && !s_.crowded() ? std::min(slot, cached_window) : slot;
    }

    // Not everybody begins with the same rank's memory.
    template <class F>
    void each_other(F visit) const {
        for (int i = 1; i < ranks(); ++i) visit((rank() + i) % ranks());
    }

    // What lies at `sources`, one of each rank.
    void combine(std::byte* to, const std::byte* const* sources, std::size_t bytes, const Combine& how) const noexcept {
        jitter::step();
        reduce_many(to, sources, ranks(), bytes / item_size(how.dtype), how.dtype, how.op, how.divisor);
    }

    Way way_of(int root, std::size_t longest) const noexcept {
        return {root, false, longest, std::min(longest, s_.layout().slot_bytes), longest <= sizeof(Note::data), 0};
    }

    // The same on all ranks, whatever they show.
    bool fits_share(const Way& way, std::size_t footprint) const noexcept {
        return !way.in_note && footprint <= s_.share_bytes() && way.longest <= way.window;
    }

    // An operation that goes one way. `publish(to, from, size)` writes the window [from, from + size) of what this rank shows,
    // `consume(shown, from, size)` reads it. `meanwhile()` is for whoever has only to wait for the others to read.
    template <class Bytes, class Publish, class Consume, class Meanwhile>
    Outcome pass(const Call& call, const Way& way, std::span<const std::byte> mine, Bytes bytes_of, Publish publish,
                 Consume consume, Meanwhile meanwhile) {
        if ((rank() == way.root) == way.to_root) {
            const Outcome outcome = one_way_.begin_reading(call, way.root, way.to_root);
            return outcome == Outcome::done ? read_pieces(call.once_met(), way, bytes_of, consume) : outcome;
        }
        const Outcome outcome = one_way_.begin_showing(call, way, [&](Note& note, std::byte* slot) {
            if (way.home == 0) publish(way.in_note ? note.data : slot, 0, way.size(0));
        });
        if (outcome != Outcome::done) return outcome;
        if (way.home != 0) meanwhile();
        return one_way_.go_on_showing(call.once_met(), way, mine, [&](std::byte* to, std::uint64_t piece) {
            publish(to, piece * way.window, way.size(piece));
        });
    }
    template <class Bytes, class Publish, class Consume>
    Outcome pass(const Call& call, const Way& way, std::span<const std::byte> mine, Bytes bytes_of, Publish publish,
                 Consume consume) {
        return pass(call, way, mine, bytes_of, publish, consume, [] {});
    }

    template <class Bytes, class Consume>
    Outcome read_pieces(const Call& call, const Way& way, Bytes bytes_of, Consume consume) {
        const auto home_shown = [&](int r) -> std::uint64_t {
            const bool shows = r != rank() && (way.to_root || r == way.root) && !way.mine_in_slot;
            return shows ? one_way_.shown_by(r).home.load(std::memory_order_relaxed) : 0;
        };
        find_homes(home_shown, bytes_of);
        return one_way_.go_on_reading(call, way, [&](std::uint64_t piece, std::size_t from, std::size_t size) {
            fetched_ = Outcome::done;
            const auto where = way.in_note       ? Shown::Where::note
                               : way.at_readers  ? Shown::Where::own_slot
                               : way.shares_slot ? Shown::Where::share
                                                 : Shown::Where::slot;
            consume(Shown(*this, where, one_way_.first() + piece), from, size);
            haul_.carry_out([&](const Load& load) {
                if (fetched_ == Outcome::done)
                    fetched_ = one_way_.fetch(call, way, load.rank, load.to, load.place, load.bytes);
            });
            return fetched_;
        });
    }

    // Takes the operation's first step and waits for everybody; only then is anything of theirs looked at.
    Outcome meet(const Call& call) {
        // Before it is taken: others must not take this rank for one that came.
        Outcome outcome = s_.may_take(s_.step() + 1);
        if (outcome != Outcome::done) return outcome;
        const std::uint64_t fingerprint = one_way_.shown_fingerprint(call);
        s_.next_line().fingerprint.store(fingerprint, std::memory_order_relaxed);
        s_.arrive();
        outcome = s_.wait(s_.step(), call.bound);
        resumes_ = outcome == Outcome::interrupted && call.bound.resumable;
        if (resumes_) s_.step_back();
        if (outcome != Outcome::done && outcome != Outcome::broken) return outcome;
        // Where the operations of those who have come differ, each can say so itself, also if another was the first to see it.
        for (int r = 0; r < ranks(); ++r)
            if (s_.reached(r, s_.step()) && s_.line_of(r, s_.step()).fingerprint.load(std::memory_order_relaxed) != fingerprint)
                return one_way_.mismatch(s_.step(), r);
        if (outcome == Outcome::done) one_way_.met();
        return outcome;
    }

    // After the first step: where the arrays of all ranks can be read, by what they have said (`home_of(r)`). True if all can.
    template <class Home, class Bytes>
    bool find_homes(Home home_of, Bytes bytes_of) {
        bool all = true;
        for (int r = 0; r < ranks(); ++r) {
            const std::uint64_t home = home_of(r);
            addresses_[r] = s_.reads_peers() && Segment::is_address(home) ? home : 0;
            homes_[r] = home != 0 && addresses_[r] == 0 ? s_.at(r, home, bytes_of(r)) : nullptr;
            if (homes_[r] == nullptr && addresses_[r] == 0) all = false;
        }
        return all;
    }

    // The same where all have met.
    template <class Bytes>
    bool find_homes(Bytes bytes_of) {
        return find_homes([this](int r) { return s_.line_of(r, s_.step()).home.load(std::memory_order_relaxed); }, bytes_of);
    }

    bool any_home() const noexcept {
        for (int r = 0; r < ranks(); ++r)
            if (homes_[r] != nullptr || addresses_[r] != 0) return true;
        return false;
    }

    bool any_address() const noexcept {
        return std::any_of(addresses_.begin(), addresses_.end(), [](std::uint64_t address) { return address != 0; });
    }

    // Where an array that this rank shows can be read by the others; 0 if it has to be copied into a slot, as parts that lie
    // apart have: then there is no array.
    std::uint64_t home_of(const std::byte* array, std::size_t bytes, std::size_t footprint, bool by_address) const noexcept {
        if (array == nullptr) return 0;
        const std::uint64_t offset = footprint > worth_sharing ? s_.offset_of(array, bytes) : 0;
        return offset == 0 && by_address && !one_way_.was_asked() ? Segment::address_of(array) : offset;
    }

    // Whether arrays of up to this length are read from the memory of the rank that has them: between two ranks, or if threads
    // help. Else, with more ranks an array is read several times, or one rank reads them all, and each time it costs more than
    // to copy it out of a slot.
    bool gathers_by_address(std::size_t longest) const noexcept {
        return (ranks() == 2 && s_.copies_once(longest)) || is_helped(ranks() * longest);
    }

    // The same for what all others read. They stand in each other's way in its page tables.
    bool broadcasts_by_address(std::size_t bytes) const noexcept {
        const auto readers = static_cast<std::size_t>(ranks() - 1);
        return readers == 1 ? is_helped(2 * bytes) : is_helped(bytes, 4 * readers);
    }

    // Whether threads help to read so many bytes where they lie. `times`: how much longer that has to be than where it gains
    // most.
    bool is_helped(std::size_t bytes, std::size_t times = 1) const noexcept {
        return has_helpers() && s_.reads_peers() && bytes >= times * s_.thresholds().worth_helping;
    }
    // The same on all ranks, also where one has got no threads: it shows and reads as the others do, alone.
    bool has_helpers() const noexcept { return s_.thresholds().helpers > 0; }

    // The same for the parts that one rank has for all others: it need not copy them, and each reads its own. Several that do so
    // at once stand in each other's way in its page tables, so all parts together have to be long.
    bool parts_by_address(std::size_t each) const noexcept {
        return ranks() == 2 ? s_.copies_once(each) : s_.reads_peers() && (ranks() - 1) * each >= worth_reading_parts;
    }

    // So many ranks do not read their part where it lies, although they could: the root copies theirs into its slot while it
    // has nothing else to do, and fewer stand in each other's way. Not of a long array, whose large pages are read at little
    // cost, and not where ranks share cores, because it takes one step more.
    int parts_in_slot(std::size_t each) const noexcept {
        if (ranks() == 2 || ranks() * each >= in_large_pages || s_.crowded()) return 0;
        const auto half = static_cast<std::size_t>(ranks() - 1) / 2;
        return static_cast<int>(std::min({half, s_.layout().slot_bytes / each, most_parts_in_slot}));
    }

    // Where ranks share cores, the root copies each part into the slot of the rank that reads it: it runs ahead of them, and
    // nobody waits for the one who reads last.
    bool parts_at_readers(std::size_t each) const noexcept {
        const std::size_t most = std::min(most_at_readers, s_.layout().slot_bytes);
        return s_.crowded() && each > 0 && each <= most && one_way_.others_slots_are_free();
    }

    // And for those that all have for all. More than two ranks may have to share cores, and then one step more is dear: all
    // parts together have to be long.
    bool all_parts_by_address(std::size_t each) const noexcept {
        return is_helped(ranks() * each) || (s_.copies_once(each) && (ranks() == 2 || s_.copies_once(ranks() * each / 12)));
    }

    // One piece of what the others show.
    class Shown {
    public:
        enum class Where { line, note, share, slot, own_slot };

        // At a step.
        Shown(Collectives& ops, Where where, std::uint64_t step) noexcept : ops_(ops), where_(where), step_(step) {}

        // Where rank r's lies in the segment: `place` in its array, `region` in its slot.
        const std::byte* at(int r, std::size_t place, std::size_t region) const noexcept {
            if (ops_.homes_[r] != nullptr) return ops_.homes_[r] + place;
            switch (where_) {
                case Where::line: return ops_.s_.line_of(r, step_).small + region;
                case Where::note: return ops_.s_.note(r, step_).data + region;
                case Where::share: return ops_.s_.share_of_slot(r, step_) + region;
                case Where::own_slot: return ops_.s_.slot(ops_.rank(), step_) + region;
                case Where::slot: break;
            }
            return ops_.s_.slot(r, step_) + region;
        }

        // The same, or nothing if it lies in the memory of rank r's process.
        const std::byte* near(int r, std::size_t place, std::size_t region) const noexcept {
            return ops_.addresses_[r] == 0 ? at(r, place, region) : nullptr;
        }

        // A copy of an array that is `whole` long may bypass the caches; see `copy_long`. One that need not be made at once is
        // left to `haul_`.
        void copy(std::byte* to, int r, std::size_t place, std::size_t region, std::size_t bytes, std::size_t whole = 0,
                  std::size_t streams_from = SIZE_MAX) const {
            if (ops_.addresses_[r] != 0)
                ops_.haul_.read(to, r, ops_.addresses_[r], place, bytes);
            else if (ops_.homes_[r] != nullptr && ops_.has_helpers())
                ops_.haul_.copy(to, at(r, place, region), bytes, bypasses(whole, streams_from));
            else
                copy_long(to, at(r, place, region), bytes, whole, streams_from);
        }

    private:
        Collectives& ops_;
        Where where_;
        std::uint64_t step_;
    };

    // What every other rank has for this one, into its place.
    void take_others(const Shown& shown, const Targets& target, const Lengths& counts, std::size_t from, std::size_t size,
                     std::size_t streams_from = SIZE_MAX) const {
        each_other([&](int r) {
            std::byte* const to = target.part(r, counts.sum_before(r)) + from;
            shown.copy(to, r, from, 0, part(counts[r], from, size), counts[r], streams_from);
        });
    }

    // Everybody's, one after another, into this rank's own array.
    void combine_shown(const Shown& shown, std::byte* x, std::size_t from, std::size_t size, const Combine& how) {
        near_.resize(ranks());
        for (int r = 0; r < ranks(); ++r) near_[r] = r == rank() ? x + from : shown.at(r, from, 0);
        combine(x + from, near_.data(), size, how);
    }

    // `near(r)` is what rank r has for this sum, or null if it lies in the memory of its process, at `place` of its array: that is
    // read tile by tile, which stay in the caches. True if all could be read; else `summed_` says of which tiles.
    template <class Near>
    bool combine_near_and_far(std::byte* to, Near near, std::size_t place, std::size_t bytes, const Combine& how) {
        near_.resize(ranks());
        bool is_near = true;
        for (int r = 0; r < ranks(); ++r) is_near = (near_[r] = near(r)) != nullptr && is_near;
        if (is_near) {
            share_sum(bytes, [&](std::size_t at, std::size_t size, const std::byte** sources) {
                for (int r = 0; r < ranks(); ++r) sources[r] = near_[r] + at;
                combine(to + at, sources, size, how);
            });
            return true;
        }
        const std::size_t each = far_tile(bytes);
        summed_.assign((bytes + each - 1) / each, 0);
        for (Scratch& scratch : scratch_) {
            scratch.tiles.resize(ranks() * each);
            scratch.sources.resize(ranks());
        }
        auto work = [&](std::size_t i, int hand) {
            const std::size_t at = i * each;
            summed_[i] = combine_tile(scratch_[hand], to + at, at, place + at, std::min(each, bytes - at), each, how) ? 1 : 0;
        };
        crew_.share(summed_.size(), is_helped(ranks() * bytes) ? crew_.helpers() : 0, work);
        return std::all_of(summed_.begin(), summed_.end(), [](std::uint8_t is) { return is != 0; });
    }

    // A sum of arrays that this process can read: `sum(at, size, sources)` for each piece of it, in several threads if it is long.
    // `sources` has room for an address of each rank.
    template <class Sum>
    void share_sum(std::size_t bytes, Sum sum) {
        const std::size_t worth = s_.thresholds().worth_helping;
        const bool is_long = has_helpers() && ranks() * bytes >= worth_helping_sums * worth;
        const std::size_t each = is_long ? std::max(worth / 8 / cache_line, std::size_t{1}) * cache_line : std::max(bytes, cache_line);
        for (Scratch& scratch : scratch_) scratch.sources.resize(ranks());
        auto work = [&](std::size_t i, int hand) {
            sum(i * each, std::min(each, bytes - i * each), scratch_[hand].sources.data());
        };
        crew_.share((bytes + each - 1) / each, is_long ? crew_.helpers() : 0, work);
    }

    // What one thread needs for a sum.
    struct Scratch {
        std::vector<std::byte> tiles;  // of each rank
        std::vector<const std::byte*> sources;
    };
    bool combine_tile(Scratch& scratch, std::byte* to, std::size_t at, std::size_t place, std::size_t bytes, std::size_t each,
                      const Combine& how) const noexcept {
        for (int i = 0; i < ranks(); ++i) {
            const int r = (rank() + i) % ranks();
            scratch.sources[r] = near_[r] != nullptr ? near_[r] + at : scratch.tiles.data() + r * each;
            if (near_[r] != nullptr) continue;
            if (addresses_[r] == 0 || !s_.read(r, scratch.tiles.data() + r * each, addresses_[r] + place, bytes)) return false;
        }
        combine(to, scratch.sources.data(), bytes, how);
        return true;
    }

    // Bytes of a tile: all ranks' together stay in the second-level cache. Whether each was summed has to fit into a slot.
    std::size_t far_tile(std::size_t bytes) const noexcept {
        const std::size_t shared = s_.thresholds().worth_helping / 4 / static_cast<std::size_t>(ranks());
        const std::size_t least = bytes / s_.layout().slot_bytes + 1;
        return (std::max({shared, least, cache_line}) + cache_line - 1) / cache_line * cache_line;
    }

    // `publish(to, from, size)` writes the window [from, from + size) of what this rank shows. `consume(shown, from,
    // size)` reads it.
    template <class Bytes, class Publish, class Consume>
    Outcome exchange(const Call& call, const Shape& shape, const std::byte* mine, Bytes bytes_of, Publish publish,
                     Consume consume) {
        if (const Outcome late = one_way_.catch_up(call); late != Outcome::done) return late;
        const bool in_line = shape.footprint <= sizeof(Line::small);
        const std::uint64_t first = s_.step() + 1;
        Line& line = s_.next_line();
        const std::uint64_t home = home_of(mine, bytes_of(rank()), shape.footprint, shape.by_address);
        line.home.store(home, std::memory_order_relaxed);
        const bool copies = home == 0;
        std::size_t window = std::min(shape.window, shape.longest);
        if (copies && window > 0 && !resumes_) publish(in_line ? line.small : s_.slot(rank(), first), 0, window);
        Outcome outcome = meet(call);
        if (outcome != Outcome::done || shape.longest == 0) return outcome;
        if (find_homes(bytes_of)) window = shape.longest;
        bool again = false;
        const Call rest = call.once_met();
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
            consume(Shown(*this, in_line ? Shown::Where::line : Shown::Where::slot, first + piece), from,
                    std::min(window, longest - from));
            haul_.carry_out([this](const Load&) { unread_ = true; });
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
        // Whose array was read where it lies may change it once everybody has done so.
        outcome = ask_all(call, !unread_, [&](int) { again = true; });
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
        if (const Outcome late = one_way_.catch_up(given); late != Outcome::done) return late;
        const std::size_t item = item_size(how.dtype);
        const std::uint64_t first = s_.step() + 1;
        const std::uint64_t offset = s_.offset_of(x, count * item);
        const bool far = root < 0 && is_helped(count * item, worth_helping_sums);
        const std::uint64_t home = offset == 0 && far ? Segment::address_of(x) : offset;
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
            if (home != 0) return;
            if (is_short) return copy(s_.slot(rank(), first), x, count * item);
            copy_others(s_.slot(rank(), first + k), x + k * length * item, piece_count(k));
        };
        const auto take_out = [&](std::uint64_t k) {
            if (offset == 0 && receives)
                copy_others(x + k * length * item, s_.slot(rank(), first + k), piece_count(k));
        };

        if (count > 0 && !resumes_) publish(0);
        s_.next_line().home.store(home, std::memory_order_relaxed);
        Outcome outcome = meet(given);
        if (outcome != Outcome::done || count == 0) return outcome;
        const Call call = given.once_met();
        if (find_homes([&](int) { return count * item; })) length = count;
        if (any_address()) return reduce_far(call, x, count, how, bounds);
        if (is_short && !any_home()) {
            combine_shown(Shown(*this, Shown::Where::slot, first), x, 0, count * item, how);
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

    // Each rank reduces its part of what lies in the memory of the others, in its own array, and once all have done so reads their
    // parts. If one cannot, the rest goes through the slots: what was summed from the rank that has it, the other tiles
    // as if nothing had been done, because nobody has changed those.
    template <class Bounds>
    Outcome reduce_far(const Call& call, std::byte* x, std::size_t count, const Combine& how, Bounds bounds) {
        const std::size_t item = item_size(how.dtype);
        const auto part_of = [&](int r) {
            const auto [low, high] = bounds(count, r);
            return std::pair(low * item, (high - low) * item);
        };
        const auto [mine, bytes] = part_of(rank());
        const auto near = [&](int r) -> const std::byte* {
            return r == rank() ? x + mine : homes_[r] != nullptr ? homes_[r] + mine : nullptr;
        };
        const bool summed = combine_near_and_far(x + mine, near, mine, bytes, how);
        if (!summed) copy(s_.slot(rank(), s_.step() + 1), reinterpret_cast<const std::byte*>(summed_.data()), summed_.size());
        std::vector<std::vector<std::uint8_t>> tiles(ranks());
        Outcome outcome = ask_all(call, summed, [&](int r) {
            const auto* theirs = reinterpret_cast<const std::uint8_t*>(s_.slot(r, s_.step()));
            tiles[r].assign(theirs, theirs + tiles_of(part_of(r).second));
        });
        if (outcome != Outcome::done) return outcome;
        bool again = std::any_of(tiles.begin(), tiles.end(), [](const auto& of_rank) { return !of_rank.empty(); });
        if (!again) {
            unread_ = false;
            each_other([&](int r) {
                const auto [from, size] = part_of(r);
                if (homes_[r] != nullptr)
                    haul_.copy(x + from, homes_[r] + from, size, false);
                else
                    haul_.read(x + from, r, addresses_[r], from, size);
            });
            haul_.carry_out([this](const Load&) { unread_ = true; });
            outcome = ask_all(call, !unread_, [&](int) { again = true; });
            if (outcome != Outcome::done || !again) return outcome;
        }
        s_.read_peers(false);
        for (int r = 0; r < ranks() && outcome == Outcome::done; ++r) {
            const auto [from, size] = part_of(r);
            const std::size_t each = far_tile(size);
            tiles[r].resize(tiles_of(size), tiles[r].empty() ? 1 : 0);
            for (std::size_t i = 0; i < tiles[r].size() && outcome == Outcome::done; ++i) {
                const std::size_t at = i * each, length = std::min(each, size - at);
                outcome = tiles[r][i] != 0 ? broadcast(call, x + from + at, length, r)
                                           : all_reduce(call, x + from + at, length / item, how);
            }
        }
        return outcome;
    }
    std::size_t tiles_of(std::size_t bytes) const noexcept { return (bytes + far_tile(bytes) - 1) / far_tile(bytes); }

    // A step at which each rank says whether all is well with it. `not_well(r)` is called for each that says no.
    template <class NotWell>
    Outcome ask_all(const Call& call, bool well, NotWell not_well) {
        s_.next_line().home.store(well ? 0 : 1, std::memory_order_relaxed);
        s_.arrive();
        const Outcome outcome = s_.wait(s_.step(), call.bound);
        if (outcome != Outcome::done) return outcome;
        for (int r = 0; r < ranks(); ++r)
            if (s_.line_of(r, s_.step()).home.load(std::memory_order_relaxed) != 0) not_well(r);
        return outcome;
    }

    // Tile by tile, so that the result is copied to the others while it is in the cache.
    template <class Place>
    void reduce_part(Place place, std::size_t begin, std::size_t end, const Combine& how, int root) {
        share_sum(end - begin, [&](std::size_t from, std::size_t size, const std::byte** sources) {
            for (std::size_t at = begin + from, stop = at + size; at < stop; at += tile) {
                const std::size_t bytes = std::min(tile, stop - at);
                for (int r = 0; r < ranks(); ++r) sources[r] = place(r) + at;
                std::byte* to = place(root < 0 ? rank() : root) + at;
                combine(to, sources, bytes, how);
                if (root < 0) each_other([&](int r) { copy(place(r) + at, to, bytes); });
            }
        });
    }

    Segment& s_;
    OneWay one_way_;
    Crew crew_;
    Haul haul_;
    bool resumes_ = false;  // the next operation was interrupted before: it has shown all it has to show
    Telling telling_{};     // the scatter under way
    std::vector<std::byte*> homes_;           // arrays in heaps; null for others
    std::vector<std::uint64_t> addresses_;    // arrays in the memory of processes; 0 for others
    bool unread_ = false;                     // this rank could not read one of them
    Outcome fetched_ = Outcome::done;         // how it went to fetch one instead
    std::vector<const std::byte*> near_;      // of `combine_near_and_far`
    std::vector<std::uint8_t> summed_;
    std::vector<Scratch> scratch_;            // one for each hand
};

}  // namespace phalanx
