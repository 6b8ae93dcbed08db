// The collectives that combine what the ranks have.
//
// Long arrays that lie in the memory of the ranks' processes are read tile by tile (`reduce_far`), with threads that help.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "areas.hpp"
#include "moves.hpp"
#include "reduce.hpp"

namespace phalanx {

struct Combine {
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    std::int64_t divisor = 1;
};

class Sums : public Moves {
public:
    // `source` has one part for each rank, `target` one.
    Outcome reduce_scatter(const Call& call, const Sources& source, std::byte* target, std::size_t count,
                           const Combine& how) {
        const std::size_t item = item_size(how.dtype);
        const std::size_t bytes = count * item;
        const std::size_t region = region_bytes(item);
        const std::size_t stride = std::min(region, bytes);
        begin_moving(ranks() * (ranks() + 1) * bytes);
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
        begin_moving(ranks() * bytes);
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
        begin_moving(ranks() * bytes);
        Way way = way_of(root, bytes);
        way.to_root = true;
        way.shares_slot = fits_share(way, bytes);
        return pass(
            call, way, {}, [bytes](int) { return bytes; },
            [&](std::byte* to, std::size_t from, std::size_t size) { copy(to, x + from, size); },
            [&](const Shown& shown, std::size_t from, std::size_t size) { combine_shown(shown, x, from, size, how); });
    }

protected:
    explicit Sums(Segment& segment) : Moves(segment), scratch_(static_cast<std::size_t>(crew_.helpers()) + 1) {}

private:
    // Up to here the root of a reduction does all of it: half the steps are worth more than the others' help.
    static constexpr std::size_t reduced_by_root = 2 << 10;
    // Up to here an array is reduced by all even if it lies in a heap. No more than `worth_sharing`: nobody may read an array
    // where its owner writes the result meanwhile.
    static constexpr std::size_t worth_reducing_at_home = 16 << 10;
    static_assert(std::max(worth_reducing_at_home, reduced_by_root) <= worth_sharing);
    // Bytes of a rank's part from which others take pieces of it.
    static constexpr std::size_t worth_taking = 128 << 10;
    // A sum has to be so many times longer than a copy for threads to help with it: each rank reads twice, and waits in between.
    static constexpr std::size_t worth_helping_sums = 4;

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
        begin_moving(ranks() * count * item);
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

        if (count > 0 && !resumes_) {
            publish(0);
            // Once only: when it is resumed, others may have taken some.
            if (offset != 0 && count * item >= worth_taking) s_.offer_lots();
        }
        s_.next_line().home.store(home, std::memory_order_relaxed);
        Outcome outcome = meet(given);
        if (outcome != Outcome::done || count == 0) return outcome;
        const Call call = given.once_met();
        const bool all_at_home = find_homes([&](int) { return count * item; });
        if (all_at_home) length = count;
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
            const auto part_of = [&](int r) {
                const auto [low, high] = bounds(piece_count(k), r);
                return std::pair(low * item, high * item);
            };
            const auto place = [&](int r) {
                if (r == rank()) return x + k * length * item;
                return homes_[r] != nullptr ? homes_[r] + k * length * item : s_.slot(r, first + k);
            };
            if (all_at_home && part_of(0).second >= worth_taking)
                reduce_together(place, part_of, first, how, root);
            else
                reduce_part(place, part_of(rank()), how, root);
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
                    haul_.copy(x + from, homes_[r] + from, size, by(0));
                else
                    haul_.read(x + from, r, addresses_[r], from, size, overflows_);
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

    template <class Place>
    void reduce_part(Place place, std::pair<std::size_t, std::size_t> part, const Combine& how, int root) {
        backwards_ = !backwards_;
        share_sum(part.second - part.first, [&](std::size_t from, std::size_t size, const std::byte** sources) {
            reduce_piece(place, sources, part.first + from, size, backwards_, how, root);
        });
    }

    // The parts of all ranks, where everybody can read and write everything: each rank its own, piece by piece, and then what the
    // others have not come to. On a machine that is not quiet, one core is often slower than another. Who takes a piece
    // makes no difference to what it becomes, as long as all ranks treat denormal numbers alike.
    //
    // Each hand of a rank has a lot that it begins with, as in `Crew::share`. `part_of(r)`: the bytes that are the part of rank r.
    template <class Place, class PartOf>
    void reduce_together(Place place, PartOf part_of, std::uint64_t first, const Combine& how, int root) {
        const std::size_t longest = part_of(0).second;
        const int lots = lots_of(longest);
        const std::size_t each = piece_of_lot(longest / static_cast<std::size_t>(lots));
        const bool backwards = first / 2 % 2 == 1;  // all ranks have to agree, and such an operation takes two steps
        for (Scratch& scratch : scratch_) scratch.sources.resize(ranks());
        const auto take_from = [&](int owner, int lot, int hand) {
            const auto [begin, end] = part_of(owner);
            const std::size_t pieces = (end - begin + each - 1) / each, whose = static_cast<std::size_t>(lot);
            const std::size_t before = pieces * whose / lots, mine = pieces * (whose + 1) / lots - before;
            const std::size_t left = owner == rank() ? 0 : 1;  // the owner has the last one in its cache, and is soon done
            Shared<std::uint64_t>& taken = s_.lot(owner, lot).taken;
            while (taken.load(std::memory_order_relaxed) + left < mine) {
                const std::size_t k = taken.fetch_add(1, std::memory_order_relaxed);
                if (k >= mine) return;
                const std::size_t at = begin + (before + (backwards ? mine - 1 - k : k)) * each;
                reduce_piece(place, scratch_[hand].sources.data(), at, std::min(each, end - at), backwards, how, root);
            }
        };
        const auto take_all = [&](int owner, int hand) {
            for (int i = 0; i < lots; ++i) take_from(owner, (hand + i) % lots, hand);
        };
        auto work = [&](std::size_t, int hand) {
            take_all(rank(), hand);
            each_other([&](int r) { take_all(r, hand); });
        };
        crew_.share(static_cast<std::size_t>(lots), lots - 1, work);
    }

    // Into how many lots the part of a rank is cut: the same on all ranks, also where one has got fewer threads.
    int lots_of(std::size_t bytes) const noexcept {
        const std::size_t worth = s_.thresholds().worth_helping;
        const int most = std::min(s_.thresholds().helpers, Crew::largest);
        if (static_cast<std::size_t>(ranks()) * bytes < worth_helping_sums * worth) return 1;
        return Crew::helpers_for(2 * static_cast<std::size_t>(ranks()) * bytes, worth, most) + 1;
    }
    static std::size_t piece_of_lot(std::size_t bytes) noexcept {
        return std::clamp(bytes / 16 / tile, std::size_t{1}, std::size_t{8}) * tile;
    }

    // Tile by tile, so that the result is copied to the others while it is in the cache; by turns (turns.hpp). `sources` has room
    // for an address of each rank.
    template <class Place>
    void reduce_piece(Place place, const std::byte** sources, std::size_t begin, std::size_t size, bool backwards,
                      const Combine& how, int root) {
        each_piece(size, tile, backwards, [&](std::size_t done, std::size_t bytes) {
            const std::size_t at = begin + done;
            for (int r = 0; r < ranks(); ++r) sources[r] = place(r) + at;
            std::byte* to = place(root < 0 ? rank() : root) + at;
            combine(to, sources, bytes, how);
            if (root < 0) each_other([&](int r) { copy(place(r) + at, to, bytes); });
        });
    }

    // What lies at `sources`, one of each rank.
    void combine(std::byte* to, const std::byte* const* sources, std::size_t bytes, const Combine& how) const noexcept {
        jitter::step();
        reduce_many(to, sources, ranks(), bytes / item_size(how.dtype), how.dtype, how.op, how.divisor);
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
        crew_.share(summed_.size(), helpers_for(bytes), work);
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
        crew_.share((bytes + each - 1) / each, is_long ? helpers_for(bytes) : 0, work);
    }

    // A sum of so many bytes of each rank takes longer than a copy of them.
    int helpers_for(std::size_t bytes) const noexcept {
        return crew_.helpers_for(2 * static_cast<std::size_t>(ranks()) * bytes, s_.thresholds().worth_helping);
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

    std::vector<const std::byte*> near_;  // of `combine_near_and_far`
    std::vector<std::uint8_t> summed_;
    std::vector<Scratch> scratch_;        // one for each hand
    bool backwards_ = false;              // the last `reduce_part`
};

}  // namespace phalanx
