// How the ranks of a segment show each other what they have: what all collectives there are made of.
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
// Nobody goes on before all have read. At that last step each rank says whether it could. If one could not, all do the
// operation once more through the slots, and from then on all operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crew.hpp"
#include "fingerprint.hpp"
#include "haul.hpp"
#include "jitter.hpp"
#include "long_copy.hpp"
#include "one_way.hpp"
#include "segment.hpp"

namespace phalanx {

class Exchange {
protected:
    explicit Exchange(Segment& segment)
        : s_(segment),
          one_way_(segment),
          crew_(std::max(segment.thresholds().helpers, segment.thresholds().root_helpers)),
          haul_(segment, crew_),
          homes_(segment.ranks()),
          addresses_(segment.ranks()) {}

    static constexpr std::size_t tile = 16 << 10;  // stays in the first-level cache
    // Up to here an array is copied even if it lies in a heap: that costs less than one more step.
    static constexpr std::size_t worth_sharing = 32 << 10;
    static constexpr std::size_t cached_window = 128 << 10;

    // An operation in which each rank shows something, and then everybody reads it.
    struct Shape {
        std::size_t longest;    // bytes of the longest part that one rank has for another
        std::size_t window;     // how much of each part goes into a slot at a time
        std::size_t footprint;  // bytes in a slot, if the parts are short enough for one piece
        bool by_address;        // whether arrays that lie elsewhere are read there
    };

    // An operation begins in which all ranks together read and write so many bytes.
    void begin_moving(std::size_t bytes) noexcept {
        const Thresholds& sizes = s_.thresholds();
        by_ = bytes >= sizes.ahead_from ? CopyBy::ahead : CopyBy::plain;
        overflows_ = bytes > sizes.overflows_caches && sizes.past_from < Thresholds::never;
    }

    // To where others may read it: into the caches.
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) const noexcept { copy_by(by_, to, from, bytes); }

    // How to copy what only this rank reads, and belongs to an array of this length: a long one would push everything else out of
    // the caches.
    CopyBy by(std::size_t whole, std::size_t past_from = 0) const noexcept {
        return overflows_ || whole >= std::max(past_from, s_.thresholds().past_from) ? CopyBy::past : by_;
    }

    // This rank's own part, after those of the others were named: at once, or together with theirs.
    void copy_own(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t whole) {
        if (haul_.empty())
            copy_by(by(whole), to, from, bytes);
        else
            haul_.copy(to, from, bytes, by(whole));
    }
    // The same by itself.
    void copy_at_once(std::byte* to, const std::byte* from, std::size_t bytes) {
        if (!is_helped(bytes)) return copy_by(by(bytes), to, from, bytes);
        haul_.copy(to, from, bytes, by(bytes));
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
        return one_way_.go_on_showing(
            call.once_met(), way, [mine](int) { return mine; },
            [&](std::byte* to, std::uint64_t piece) { publish(to, piece * way.window, way.size(piece)); });
    }
    template <class Bytes, class Publish, class Consume>
    Outcome pass(const Call& call, const Way& way, std::span<const std::byte> mine, Bytes bytes_of, Publish publish,
                 Consume consume) {
        return pass(call, way, mine, bytes_of, publish, consume, [] {});
    }

    template <class Bytes, class Consume>
    Outcome read_pieces(const Call& call, const Way& way, Bytes bytes_of, Consume consume) {
        const auto shows = [&](int r) { return r != rank() && (way.to_root || r == way.root); };
        const auto home_shown = [&](int r) -> std::uint64_t {
            if (!shows(r) || way.mine_in_slot) return 0;
            return way.part_home != 0 ? way.part_home : one_way_.shown_by(r).home.load(std::memory_order_relaxed);
        };
        find_homes(home_shown, bytes_of);
        // Then nothing comes in pieces. What has a home where nobody may read does: a slot holds no more than a piece.
        bool all_at_home = true;
        for (int r = 0; r < ranks(); ++r) all_at_home = all_at_home && (!shows(r) || has_home(r));
        return one_way_.go_on_reading(call, way, all_at_home, [&](std::uint64_t piece, std::size_t from, std::size_t size) {
            fetched_ = Outcome::done;
            const auto where = way.in_note       ? Shown::Where::note
                               : way.at_readers  ? Shown::Where::own_slot
                               : way.shares_slot ? Shown::Where::share
                                                 : Shown::Where::slot;
            consume(Shown(*this, where, one_way_.first() + piece), from, size);
            const auto missed = [&](const Load& load) {
                if (fetched_ == Outcome::done)
                    fetched_ = one_way_.fetch(call, way, load.rank, load.to, load.place, load.bytes);
            };
            // What a root reads of others that rest is worth a helper of its own sooner: their cores are idle anyway.
            const auto& limits = s_.thresholds();
            if (way.to_root && limits.root_helpers > 0)
                haul_.carry_out(limits.root_helpers, limits.worth_helping / 2, missed);
            else
                haul_.carry_out(missed);
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
            if (!has_home(r)) all = false;
        }
        return all;
    }

    // The same where all have met.
    template <class Bytes>
    bool find_homes(Bytes bytes_of) {
        return find_homes([this](int r) { return s_.line_of(r, s_.step()).home.load(std::memory_order_relaxed); }, bytes_of);
    }

    bool has_home(int r) const noexcept { return homes_[r] != nullptr || addresses_[r] != 0; }

    bool any_home() const noexcept {
        for (int r = 0; r < ranks(); ++r)
            if (has_home(r)) return true;
        return false;
    }

    bool any_address() const noexcept {
        return std::any_of(addresses_.begin(), addresses_.end(), [](std::uint64_t address) { return address != 0; });
    }

    // Where an array that this rank shows can be read by the others; 0 if it has to be copied into a slot, or there is no
    // array, because its parts lie apart.
    std::uint64_t home_of(const std::byte* array, std::size_t bytes, std::size_t footprint, bool by_address) const noexcept {
        if (array == nullptr) return 0;
        const std::uint64_t offset = footprint > worth_sharing ? s_.offset_of(array, bytes) : 0;
        return offset == 0 && by_address && !one_way_.was_asked() ? Segment::address_of(array) : offset;
    }

    // Whether threads help to read so many bytes where they lie. `times`: how much longer that has to be than where it gains
    // most.
    bool is_helped(std::size_t bytes, std::size_t times = 1) const noexcept {
        return has_helpers() && s_.reads_peers() && bytes >= times * s_.thresholds().worth_helping;
    }
    // The same on all ranks, also where one has got no threads: it shows and reads as the others do, alone.
    bool has_helpers() const noexcept { return s_.thresholds().helpers > 0; }

    // One piece of what the others show.
    class Shown {
    public:
        enum class Where { line, note, share, slot, own_slot };

        // At a step.
        Shown(Exchange& ops, Where where, std::uint64_t step) noexcept : ops_(ops), where_(where), step_(step) {}

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

        // Past the caches if the array that it belongs to is so long, see `by`. What need not be copied at once is left to `haul_`.
        void copy(std::byte* to, int r, std::size_t place, std::size_t region, std::size_t bytes, std::size_t whole = 0,
                  std::size_t past_from = SIZE_MAX) const {
            const CopyBy by = ops_.by(whole, past_from);
            if (ops_.addresses_[r] != 0)
                ops_.haul_.read(to, r, ops_.addresses_[r], place, bytes, ops_.overflows_);
            else if (ops_.homes_[r] != nullptr && ops_.has_helpers())
                ops_.haul_.copy(to, at(r, place, region), bytes, by);
            else
                copy_by(by, to, at(r, place, region), bytes);
        }

    private:
        Exchange& ops_;
        Where where_;
        std::uint64_t step_;
    };

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

    Segment& s_;
    OneWay one_way_;
    Crew crew_;
    Haul haul_;
    bool resumes_ = false;  // the next operation was interrupted before: it has shown all it has to show
    std::vector<std::byte*> homes_;           // arrays in heaps; null for others
    std::vector<std::uint64_t> addresses_;    // arrays in the memory of processes; 0 for others
    CopyBy by_ = CopyBy::plain;               // how what belongs to the operation is copied
    bool overflows_ = false;                  // the caches do not hold what it reads and writes
    bool unread_ = false;                     // this rank could not read one of them
    Outcome fetched_ = Outcome::done;         // how it went to fetch one instead
};

}  // namespace phalanx
