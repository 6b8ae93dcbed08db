// The collectives that move data as they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "areas.hpp"
#include "exchange.hpp"

namespace phalanx {

class Moves : public Exchange {
public:
    Outcome broadcast(const Call& call, std::byte* x, std::size_t bytes, int root) {
        begin_moving(ranks() * bytes);
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
        begin_moving((ranks() + 1) * counts.sum_before(ranks()));
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
        begin_moving(2 * counts.sum_before(ranks()));
        Way way = way_of(root, longest);
        way.to_root = true;
        way.window = std::min(way.window, window_bytes());
        if (rank() != root) way.home = home_of(source, mine, mine, root_gathers_by_address(longest));
        way.shares_slot = fits_share(way, longest);
        bool own_left = false;
        const Outcome outcome = pass(
            call, way, {source, mine}, [&](int r) { return counts[r]; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, source + from, part(mine, from, size)); },
            [&](const Shown& shown, std::size_t from, std::size_t size) {
                take_others(shown, target, counts, from, size, past_if_shown);
                // Those who wait until their array was read go on before this rank copies its own part, unless threads help with all.
                own_left = any_home() && !is_helped(ranks() * longest);
                std::byte* const own = target.part(rank(), counts.sum_before(rank())) + from;
                if (!own_left) copy_own(own, source + from, part(mine, from, size), mine);
            });
        if (outcome == Outcome::done && own_left) copy_at_once(target.part(rank(), counts.sum_before(rank())), source, mine);
        return outcome;
    }

    // `source` on `root` only.
    Outcome scatter(const Call& call, const std::byte* source, std::byte* target, const Lengths& counts, int root) {
        const std::size_t longest = counts.longest();
        Way way = way_of(root, longest);
        way.in_note = ranks() * longest <= sizeof(Note::data);
        way.window = std::min(region_bytes(1), longest);
        const std::size_t total = counts.sum_before(ranks());
        begin_moving(2 * total);
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

    // `sizes`: bytes from rank i to rank j, row by row.
    Outcome all_to_all(const Call& call, const Sources& source, const Targets& target, const Lengths& sizes) {
        const auto row = [&](int r) { return sizes.row(r, ranks()); };
        const std::size_t longest = sizes.longest();
        begin_moving(2 * ranks() * ranks() * longest);
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

    // A scatter of equal parts whose length only the root knows: `tell_parts` shows it, with all the data of a short one, and
    // `take_part` takes this rank's.
    enum class Where : std::uint8_t {
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
        begin_moving(2 * total);
        const bool in_note = sizeof(PartsHead) + total + parts.words.size() <= sizeof(Note::data);
        telling_ = {source, parts, parts_way(root, parts.shown_bytes(), in_note)};
        Way& way = telling_.way;
        way.shares_slot = !in_note && total + parts.words.size() <= s_.share_bytes() / 2;
        way.at_readers = !in_note && !way.shares_slot && parts_at_readers(parts.shown_bytes());
        if (way.at_readers) way.window = parts.bytes;
        if (!way.in_note && !way.shares_slot && !way.at_readers && total > 0)
            way.home = home_of_parts();
        if (Segment::is_address(way.home)) way.in_slot = parts_in_slot(parts.bytes);
        const bool apart = way.home != 0 && source.whole() == nullptr;
        return one_way_.begin_showing(call, way, [&](Note& note, std::byte* slot) {
            const PartsHead head{parts.bytes,  parts.kind, static_cast<std::uint16_t>(parts.words.size()), parts.where, way.in_note,
                                 way.at_readers, static_cast<std::uint8_t>(way.in_slot), way.shares_slot, apart};
            std::memcpy(note.data, &head, sizeof(head));
            std::byte* const data = way.in_note ? note.data + sizeof(head) : slot;
            if (way.at_readers)
                show_parts_at_readers();
            else if (way.home == 0)
                show_parts(data, 0);
            else if (apart)
                show_homes(note);
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
        begin_moving(2 * ranks() * parts.bytes);
        const auto bytes_of = [&](int) { return parts.bytes; };
        if (rank() == way.root) {
            if (way.in_slot > 0) {
                const Outcome outcome = one_way_.show_next(call, [&](std::byte* slot) { show_parts_in_slot(slot); });
                if (outcome != Outcome::done) return outcome;
            }
            if (target != nullptr) copy_at_once(target, part_of(rank()), parts.bytes);
            return one_way_.go_on_showing(
                call, way, [&](int reader) { return std::span(part_of(reader), parts.bytes); },
                [&](std::byte* to, std::uint64_t piece) { show_parts(to, piece); });
        }
        if (way.mine_in_slot)
            return read_pieces(call, way, bytes_of, [&](const Shown& shown, std::size_t from, std::size_t) {
                const std::size_t region = static_cast<std::size_t>(after(way.root) - 1) * parts.bytes;
                if (from > 0 && target != nullptr) shown.copy(target, way.root, 0, region, parts.bytes);
            });
        const std::size_t region = (way.at_readers ? 0 : rank() * way.window) + (way.in_note ? sizeof(PartsHead) : 0);
        return read_pieces(call, way, bytes_of, [&](const Shown& shown, std::size_t from, std::size_t size) {
            if (target != nullptr) shown.copy(target + from, way.root, from, region, size);
        });
    }

protected:
    explicit Moves(Segment& segment) : Exchange(segment) {}

private:
    // From here on what would fit into one slot is cut into pieces.
    static constexpr std::size_t worth_cutting = 512 << 10;
    // From here on one rank reads what another has for it alone in a broadcast.
    static constexpr std::size_t worth_reading_alone = 64 << 10;
    // From here on several ranks read the parts of a scatter where they lie, and from half of it where they share cores: they do
    // so one after another.
    static constexpr std::size_t worth_reading_parts = 512 << 10;
    // Up to here the root of a scatter copies parts into the slots of those who read them, where ranks share cores.
    static constexpr std::size_t most_at_readers = 64 << 10;
    // From here on NumPy asks for large pages.
    static constexpr std::size_t in_large_pages = 4 << 20;
    // From here on a copy of what another rank has just written, and the caches have, may bypass them.
    static constexpr std::size_t past_if_shown = 2 << 20;
#if defined(__x86_64__)
    static constexpr std::size_t least_broadcast_window = cached_window;
#else
    static constexpr std::size_t least_broadcast_window = SIZE_MAX;  // shorter pieces were never quicker
#endif

    // Whether arrays of up to this length are read from the memory of the rank that has them: between two ranks, or if threads
    // help. Else, with more ranks an array is read several times, or one rank reads them all, and each time it costs more than
    // to copy it out of a slot.
    bool gathers_by_address(std::size_t longest) const noexcept {
        return (ranks() == 2 && s_.copies_once(longest)) || is_helped(ranks() * longest);
    }

    // The same if only the root gathers: the other copies what comes next while it does, unless it is read.
    bool root_gathers_by_address(std::size_t longest) const noexcept {
        const Thresholds& sizes = s_.thresholds();
        const bool in_pieces = !has_helpers() && longest >= sizes.gather_in_pieces_from;
        if (s_.crowded() && ranks() > 2) return s_.reads_peers() && longest >= sizes.crowded_gather_at_home_from;
        return is_helped(ranks() * longest) || (gathers_by_address(longest) && longest >= sizes.gather_at_home_from && !in_pieces);
    }

    // The same for what all others read. They stand in each other's way in its page tables. One reader does not, but through
    // the slots the root copies what comes next while it does: to read has to gain more than where nobody does, and it never did
    // where copies ask ahead, which the kernel's do not.
    bool broadcasts_by_address(std::size_t bytes) const noexcept {
        const auto readers = static_cast<std::size_t>(ranks() - 1);
        if (readers > 1) return is_helped(bytes, readers);
        if (is_helped(2 * bytes)) return true;
        return !s_.crowded() && by_ != CopyBy::ahead && bytes >= worth_reading_alone && s_.copies_once(bytes / 2);
    }

    // The same for the parts that one rank has for all others: it need not copy them, and each reads its own. Several that do so
    // at once stand in each other's way in its page tables, so all parts together have to be long.
    bool parts_by_address(std::size_t each) const noexcept {
        if (ranks() == 2) return s_.copies_once(each);
        return s_.reads_peers() && (ranks() - 1) * each >= worth_reading_parts / (s_.crowded() ? 2 : 1);
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

    // What every other rank has for this one, into its place.
    void take_others(const Shown& shown, const Targets& target, const Lengths& counts, std::size_t from, std::size_t size,
                     std::size_t past_from = SIZE_MAX) const {
        each_other([&](int r) {
            std::byte* const to = target.part(r, counts.sum_before(r)) + from;
            shown.copy(to, r, from, 0, part(counts[r], from, size), counts[r], past_from);
        });
    }

    // What `tell_parts` shows in the root's note. Short parts and words lie behind it, others in the slot or a share of it. Of
    // parts that are read where they lie, and lie apart, the home of each is behind it: in the slot, the answer to another
    // reader's request may lie by the time that one comes to look.
    struct PartsHead {
        std::uint64_t bytes;
        std::uint64_t kind;
        std::uint16_t words;
        Where where;
        std::uint8_t in_note;
        std::uint8_t at_readers;
        std::uint8_t in_slot;
        std::uint8_t shares_slot;
        std::uint8_t apart;
    };
    using Home = std::uint64_t;
    static constexpr std::size_t most_homes = (sizeof(Note::data) - sizeof(PartsHead)) / sizeof(Home);
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
    // On the root: the part that it has for rank r.
    const std::byte* part_of(int r) const noexcept { return telling_.source.part(r, r * telling_.parts.bytes); }
    // And where that is read; 0 if it has to be copied into a slot.
    Home home_of_part(int r) const noexcept {
        const std::size_t bytes = telling_.parts.bytes;
        return home_of(part_of(r), bytes, ranks() * bytes, parts_by_address(bytes));
    }
    // The same for all of them: of parts that lie apart it is that of one of them, by its address if there is such a one.
    Home home_of_parts() const noexcept {
        const auto& [source, parts, way] = telling_;
        const std::size_t total = ranks() * parts.bytes;
        if (source.whole() != nullptr) return home_of(source.whole(), total, total, parts_by_address(parts.bytes));
        if (static_cast<std::size_t>(ranks()) > most_homes) return 0;
        Home found = 0;
        for (int r = 0; r < ranks(); ++r) {
            if (r == rank()) continue;
            const Home home = home_of_part(r);
            if (home == 0) return 0;
            if (!Segment::is_address(found)) found = home;
        }
        return found;
    }
    void show_homes(Note& note) const noexcept {
        each_other([&](int r) {
            const Home home = home_of_part(r);
            std::memcpy(note.data + sizeof(PartsHead) + r * sizeof(Home), &home, sizeof(Home));
        });
    }
    // Where this rank reads its part; 0 if not in the root's memory. What was read from shared memory is not trusted:
    // `find_homes` lets nobody read outside the root's heap or process.
    Home hear_home(const Note& note, const PartsHead& head) const noexcept {
        Home home = note.home.load(std::memory_order_relaxed);
        if (home == 0) return 0;
        if (head.apart == 0 || static_cast<std::size_t>(ranks()) > most_homes) return home + rank() * head.bytes;
        std::memcpy(&home, note.data + sizeof(head) + rank() * sizeof(Home), sizeof(Home));
        return home;
    }
    void show_parts(std::byte* to, std::uint64_t piece) const noexcept {
        const Way& way = telling_.way;
        const std::size_t from = piece * way.window;
        for (int r = 0; r < ranks(); ++r)
            if (r != rank()) copy(to + r * way.window, part_of(r) + from, way.size(piece));
    }
    void show_parts_at_readers() const noexcept {
        each_other([&](int r) { copy(s_.slot(r, s_.step() + 1), part_of(r), telling_.parts.bytes); });
    }
    void show_parts_in_slot(std::byte* to) const noexcept {
        const auto& [source, parts, way] = telling_;
        for (int i = 1; i <= way.in_slot; ++i) copy(to + (i - 1) * parts.bytes, part_of((rank() + i) % ranks()), parts.bytes);
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
        telling_.way.part_home = hear_home(note, head);
        telling_.way.in_slot = head.in_slot;
        telling_.way.at_readers = head.at_readers != 0;
        if (telling_.way.at_readers) telling_.way.window = std::min<std::size_t>(parts.bytes, s_.layout().slot_bytes);
        // What was read from shared memory is not trusted.
        const bool fits = parts.bytes <= s_.layout().slot_bytes / static_cast<std::size_t>(after(root));
        telling_.way.mine_in_slot = after(root) <= head.in_slot && fits;
    }
    // How many ranks after the root this one comes.
    int after(int root) const noexcept { return (rank() - root + ranks()) % ranks(); }

    Telling telling_{};  // the scatter under way
};

}  // namespace phalanx
