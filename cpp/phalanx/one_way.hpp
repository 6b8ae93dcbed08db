// Operations in a segment that go one way: from a root to all others, or from all others to a root.
//
// Who shows something does not wait for those who read it; who reads waits only for those who show. So ranks may be steps
// apart. Three rules hold that together:
//
// - Who has reached a step has read all that it had to read there. What a rank shows lies in its note of that step, or in
//   its slot or a share of it, and is written again only when everybody was seen far enough: `notes` steps later for a note,
//   `share_lag` for a share, and for a slot as in `exchange.hpp`, at the step before the last.
// - Before an operation at which all meet, a rank waits until all have caught up.
// - A rank enters an operation by writing its fingerprint into its note; a reader compares it with its own, also while it
//   waits, because the other may be waiting as well. Two roots that both only show would not notice it: so a root claims
//   the step, and the second one finds the first one's claim. What nobody was there to compare is found at the next
//   meeting, whose fingerprints stand for all operations since the one before, or when the group is closed (`flush`).
//
// An array that lies in the rank's heap, or that is read from the memory of its process, is not copied, and its owner
// waits until all have read it. Who cannot read it there asks for it, and gets it through a slot, piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fingerprint.hpp"
#include "jitter.hpp"
#include "segment.hpp"

namespace phalanx {

// What is the same for every operation.
struct Call {
    std::uint64_t fingerprint = 0;
    Bound bound;

    // For what follows once all have met, or this rank has shown something: it is not interrupted any more if it could have
    // run again before.
    Call once_met() const noexcept {
        Call rest = *this;
        if (rest.bound.resumable) rest.bound.interrupted = nullptr;
        rest.bound.resumable = false;
        return rest;
    }
};

// Who shows something in an operation, to whom, and in how many pieces.
struct Way {
    int root = 0;
    bool to_root = false;     // all others show something to the root; else the root does to them
    std::size_t longest = 0;  // bytes of the longest part that one rank has for another
    std::size_t window = 0;   // how much of each part goes at a time
    bool in_note = false;     // the only piece lies in the note
    std::uint64_t home = 0;   // where this rank's array is read, if not in notes or slots
    std::uint64_t part_home = 0;  // where this rank reads its own part of the root's, if each was said to lie somewhere
    // The root shows where its array lies, and at a second step the parts of so many ranks after it, in its slot: they are
    // copied while the other ranks read theirs.
    int in_slot = 0;
    bool mine_in_slot = false;  // this rank's part is one of them
    bool at_readers = false;    // each part lies in the slot of the rank that reads it
    bool shares_slot = false;   // the only piece lies in a share of the slot

    std::uint64_t pieces() const noexcept {
        if (in_slot > 0) return 2;
        return longest == 0 ? 1 : (longest + window - 1) / window;
    }
    std::size_t size(std::uint64_t piece) const noexcept { return std::min(window, longest - piece * window); }
};

class OneWay {
public:
    // At the end of the first slot there may be so many bytes that say what the operation is about.
    static constexpr std::size_t most_words = 1024;

    explicit OneWay(Segment& segment) : s_(segment), answered_(segment.ranks()) {}

    int culprit() const noexcept { return culprit_; }  // after a mismatch: a rank that is in another operation

    // Before a meeting: nobody may be behind any more.
    Outcome catch_up(const Call& call) {
        if (!ahead_) return Outcome::done;
        const Outcome outcome = s_.wait(s_.step(), call.bound);
        if (outcome == Outcome::done) ahead_ = false;
        return outcome;
    }

    // The fingerprint, and those of the operations since all have met.
    std::uint64_t shown_fingerprint(const Call& call) const noexcept {
        return passed_ == 0 ? call.fingerprint : mix(passed_ ^ mix(call.fingerprint));
    }

    void met() noexcept {
        passed_ = 0;
        run_ = 0;
        shown_ = {};
        everybody_ = s_.step();
    }

    // Another rank is in another operation: nobody may succeed in this one.
    Outcome mismatch(std::uint64_t step, int culprit) noexcept {
        culprit_ = culprit;
        s_.give_up(step);
        return Outcome::mismatch;
    }

    // Before the group is closed: waits until everybody has taken part in what this rank has shown last, or will not.
    Outcome flush(const Bound& bound) {
        if (shown_.last == 0) return Outcome::done;
        const Outcome outcome = s_.watch(shown_.last, bound);
        if (outcome != Outcome::done) return outcome;
        for (int r = 0; r < s_.ranks(); ++r) {
            const Note& note = s_.note(r, shown_.first);
            const std::uint64_t entered = note.entered.load(std::memory_order_seq_cst);
            if (entered > shown_.first) continue;  // it has written that note again
            if (entered < shown_.first || note.fingerprint.load(std::memory_order_relaxed) != shown_.fingerprint)
                return mismatch(shown_.first, r);
        }
        return Outcome::done;
    }

    // The first step of a rank that shows something. `write(note, slot)` does.
    template <class Write>
    Outcome begin_showing(const Call& call, const Way& way, Write write) {
        const std::uint64_t step = s_.step() + 1;
        if (const Outcome outcome = enter(call, &way); outcome != Outcome::done) return outcome;
        if (!way.to_root)
            if (const int other = s_.claim_root(step); other >= 0) return mismatch(step, other);
        const std::uint64_t fingerprint = shown_fingerprint(call);
        Note& note = enter_note(step, fingerprint);
        note.home.store(way.home, std::memory_order_relaxed);
        if (fills_slot(way)) filled_ = step;
        write(note, way.shares_slot ? s_.share_of_slot(s_.rank(), step) : s_.slot(s_.rank(), step));
        shown_ = {step, step, fingerprint};
        return arrive();
    }

    // Its next step. `write(slot)` writes what is shown there.
    template <class Write>
    Outcome show_next(const Call& call, Write write) {
        const std::uint64_t step = s_.step() + 1;
        if (const Outcome outcome = see_everybody(step, slot_lag, call); outcome != Outcome::done) return outcome;
        filled_ = step;
        write(s_.slot(s_.rank(), step));
        return arrive();
    }

    // Its other steps. `publish(slot, piece)` writes a piece. `array_for(reader)` is for those who cannot read it where it lies:
    // what this rank shows to that one.
    template <class ArrayFor, class Publish>
    Outcome go_on_showing(const Call& call, const Way& way, ArrayFor array_for, Publish publish) {
        if (way.home != 0) {
            s_.skip(shown_.first + way.pieces() - 1 - s_.step());
            if (const Outcome outcome = wait_for_readers(call, way, array_for); outcome != Outcome::done) return outcome;
        } else {
            for (std::uint64_t piece = 1; piece < way.pieces(); ++piece) {
                const Outcome outcome = show_next(call, [&](std::byte* slot) { publish(slot, piece); });
                if (outcome != Outcome::done) return outcome;
            }
        }
        shown_.last = s_.step();
        end(call, way);
        return Outcome::done;
    }

    // Waits for those who show something. Nothing of theirs may be looked at before.
    Outcome begin_reading(const Call& call, int root, bool to_root) {
        const std::uint64_t step = s_.step() + 1;
        if (const Outcome outcome = enter(call); outcome != Outcome::done) return outcome;
        const std::uint64_t fingerprint = shown_fingerprint(call);
        enter_note(step, fingerprint);
        const auto differs = [&](int r) {
            const Note& note = s_.note(r, step);
            return note.entered.load(std::memory_order_seq_cst) == step &&
                   note.fingerprint.load(std::memory_order_relaxed) != fingerprint;
        };
        // Another may be waiting, too, in another operation: for this rank, which shows nothing. Of two who enter at once,
        // one at least finds the other.
        if (s_.has_sleepers() && any_rank(differs)) s_.wake_sleepers();
        const Outcome outcome = wait_for_shown(call, root, to_root, differs);
        if (outcome != Outcome::done && outcome != Outcome::broken) return outcome;
        for (int r = 0; r < s_.ranks(); ++r) {
            if (r == s_.rank() || (!to_root && r != root)) continue;
            const bool is_here = s_.reached(r, step) && s_.note(r, step).entered.load(std::memory_order_seq_cst) == step;
            if (differs(r) || (!is_here && outcome == Outcome::done)) return mismatch(step, r);
        }
        first_ = step;
        return outcome;
    }

    // After `begin_reading`: what another rank shows first.
    const Note& shown_by(int rank) const noexcept { return s_.note(rank, first_); }
    std::uint64_t first() const noexcept { return first_; }

    // Reads all pieces, or everything at once if all of it is `at_home`. `consume(piece, from, size)` reads what lies in that
    // window.
    template <class Consume>
    Outcome go_on_reading(const Call& call, const Way& way, bool at_home, Consume consume) {
        if (at_home) {
            if (const Outcome outcome = consume(0, 0, way.longest); outcome != Outcome::done) return outcome;
            s_.skip(way.pieces());
            if (const Outcome outcome = s_.may_take(s_.step()); outcome != Outcome::done) return outcome;
        } else {
            for (std::uint64_t piece = 0; piece < way.pieces(); ++piece) {
                Outcome outcome = Outcome::done;
                if (piece > 0) outcome = wait_for_shown(call, way.root, way.to_root, [](int) { return false; });
                if (outcome == Outcome::done) outcome = consume(piece, piece * way.window, way.size(piece));
                if (outcome != Outcome::done) return outcome;
                s_.arrive();
                if (outcome = s_.may_take(s_.step()); outcome != Outcome::done) return outcome;
            }
        }
        end(call, way);
        return Outcome::done;
    }

    // From the array of a rank whose memory this one could not read: that rank copies it into its slot.
    Outcome fetch(const Call& call, const Way& way, int owner, std::byte* to, std::size_t from, std::size_t bytes) {
        Note& mine = s_.note(s_.rank(), first_);
        const Note& theirs = s_.note(owner, first_);
        for (std::size_t done = 0; done < bytes; done += answer_bytes()) {
            const std::size_t size = std::min(answer_bytes(), bytes - done);
            const std::uint64_t request = first_ << 32 | static_cast<std::uint64_t>(s_.rank()) << 16 | (++requests_ & 0xffff);
            mine.asked_of.store(owner, std::memory_order_relaxed);
            mine.asked_from.store(from + done, std::memory_order_relaxed);
            mine.asked_bytes.store(size, std::memory_order_relaxed);
            mine.asked.store(request, std::memory_order_seq_cst);
            s_.wake_sleeper(owner);
            const auto answered = [&](int) { return theirs.answered.load(std::memory_order_seq_cst) == request; };
            // The owner does not go beyond the operation's last step before this rank has read.
            const Outcome outcome = s_.wait_for(owner, first_ + way.pieces(), call.bound, answered);
            if (outcome != Outcome::done) return outcome;
            jitter::copy(to + done, s_.slot(owner, first_), size);
        }
        return Outcome::done;
    }

    // Whether a rank that shows something may write into the others' slots, too, once it has entered. They may still read what
    // an operation at which all met has left there; in one that goes one way, a rank that is done with a step has no such rest.
    bool others_slots_are_free() const noexcept { return ahead_ && s_.slowest() > met_until_; }

    // Whether another rank had to fetch what this one has shown: then its memory need not be offered again.
    bool was_asked() const noexcept { return was_asked_; }

private:
    // Steps that a rank may be ahead of others when it writes into a slot. Of its notes and the shares of its slots it has more.
    static constexpr std::uint64_t slot_lag = 2;
    // Operations since all have met from which on more of the kind are expected.
    static constexpr int long_run = 8;
    // How often who waits rests then. Should all of them fall asleep, the one who runs ahead wakes them for each step again.
    static constexpr int few_rests = 8;

    template <class Is>
    bool any_rank(Is is) const {
        for (int r = 0; r < s_.ranks(); ++r)
            if (is(r)) return true;
        return false;
    }

    // What goes into a slot at once for those who ask. Others may still read the words at its end.
    std::size_t answer_bytes() const noexcept { return s_.layout().slot_bytes - most_words; }

    // Waits until everybody is not more than so many steps behind `step`. Where ranks share cores, one that has to wait lets
    // them come half of that closer: to change places for each step would cost more than the steps.
    Outcome see_everybody(std::uint64_t step, std::uint64_t lag, const Call& call) {
        if (step <= everybody_ + lag) return Outcome::done;
        if (step > s_.slowest() + lag && s_.crowded()) lag -= lag / 2;
        const Outcome outcome = s_.wait(step - lag, resting(call.bound));
        if (outcome == Outcome::done) everybody_ = s_.slowest();
        return outcome;
    }

    // `way`: of a rank that shows something.
    Outcome enter(const Call& call, const Way* way = nullptr) {
        if (s_.aborted()) return Outcome::aborted;
        if (!ahead_) met_until_ = s_.step();
        ahead_ = true;
        const std::uint64_t step = s_.step() + 1;
        if (way == nullptr || way->in_note) return see_everybody(step, notes, call);
        return see_everybody(step, fills_slot(*way) ? slot_lag : share_lag(step), call);
    }

    static bool fills_slot(const Way& way) noexcept { return !way.in_note && (!way.shares_slot || way.home != 0); }

    // The same for a share of a slot. Nobody may still read what filled the slot: what this rank has shown there, or what an
    // operation at which all met has left.
    std::uint64_t share_lag(std::uint64_t step) const noexcept {
        const std::uint64_t last_read = std::max(met_until_ + 1, filled_);
        return std::clamp(step > last_read ? step - last_read : 0, slot_lag, depth * s_.shares() - slot_lag);
    }

    Note& enter_note(std::uint64_t step, std::uint64_t fingerprint) noexcept {
        Note& note = s_.note(s_.rank(), step);
        note.fingerprint.store(fingerprint, std::memory_order_relaxed);
        note.entered.store(step, std::memory_order_seq_cst);
        return note;
    }

    // Nobody succeeds who arrives after another has given the step up: that one has said so before it looked a last time.
    Outcome arrive() noexcept {
        s_.arrive();
        return s_.may_take(s_.step());
    }

    void end(const Call& call, const Way& way) noexcept {
        passed_ = mix(passed_ ^ call.fingerprint);
        run_ = way.in_note ? run_ + 1 : 0;
    }

    // Where ranks share cores and many operations went one way in notes, those who show run ahead: who waits need not be woken
    // for each step.
    Bound resting(const Bound& limits) const noexcept {
        Bound bound = limits;
        if (s_.crowded() && run_ >= long_run) bound.rests = few_rests;
        return bound;
    }

    // At the next step. `hopeless(r)`: rank r will not come.
    template <class Hopeless>
    Outcome wait_for_shown(const Call& call, int root, bool to_root, Hopeless hopeless) {
        const std::uint64_t step = s_.step() + 1;
        const Bound bound = resting(call.bound);
        return to_root ? s_.wait_for_others(step, bound, hopeless) : s_.wait_for(root, step, bound, hopeless);
    }

    template <class ArrayFor>
    Outcome wait_for_readers(const Call& call, const Way& way, ArrayFor array_for) {
        const auto asks = [&](int r) {
            const Note& note = s_.note(r, shown_.first);
            const std::uint64_t request = note.asked.load(std::memory_order_seq_cst);
            return request >> 32 == (shown_.first & 0xffffffff) && request != answered_[r] &&
                   note.asked_of.load(std::memory_order_relaxed) == s_.rank();
        };
        for (;;) {
            const Outcome outcome = way.to_root ? s_.wait_for(way.root, s_.step(), call.bound, asks)
                                                : s_.wait_for_others(s_.step(), call.bound, asks);
            if (outcome != Outcome::done) return outcome;
            int reader = 0;
            while (reader < s_.ranks() && !asks(reader)) ++reader;
            if (reader == s_.ranks()) return Outcome::done;
            if (const Outcome answered = answer(call, reader, array_for(reader)); answered != Outcome::done) return answered;
        }
    }

    // Copies what a rank asks for into the slot, and waits until it has taken it out.
    Outcome answer(const Call& call, int reader, std::span<const std::byte> mine) {
        was_asked_ = true;
        const Note& note = s_.note(reader, shown_.first);
        const std::uint64_t request = answered_[reader] = note.asked.load(std::memory_order_seq_cst);
        const std::uint64_t from = note.asked_from.load(std::memory_order_relaxed);
        const std::uint64_t bytes = note.asked_bytes.load(std::memory_order_relaxed);
        // What was read from shared memory is not trusted.
        if (from > mine.size() || bytes > mine.size() - from || bytes > answer_bytes()) return Outcome::aborted;
        jitter::copy(s_.slot(s_.rank(), shown_.first), mine.data() + from, bytes);
        s_.note(s_.rank(), shown_.first).answered.store(request, std::memory_order_seq_cst);
        s_.wake_sleeper(reader);
        return s_.wait_for(reader, s_.step(), call.bound,
                           [&](int) { return note.asked.load(std::memory_order_seq_cst) != request; });
    }

    // What this rank has shown last, since all have met: from which step to which.
    struct LastShown {
        std::uint64_t first = 0, last = 0;
        std::uint64_t fingerprint = 0;
    };

    Segment& s_;
    int culprit_ = -1;
    bool ahead_ = false;            // others may be behind
    std::uint64_t met_until_ = 0;   // the last step of the last operation at which all met
    std::uint64_t passed_ = 0;      // the fingerprints of the operations since all have met
    int run_ = 0;                   // how many of the last ones were in notes
    LastShown shown_;
    std::uint64_t first_ = 0;       // the first step of the operation that is read
    std::uint64_t everybody_ = 0;   // a step that everybody has reached
    std::uint64_t requests_ = 0;    // that this rank has made
    std::vector<std::uint64_t> answered_;  // the last one of each rank
    bool was_asked_ = false;
    std::uint64_t filled_ = 0;      // the last step at which this rank wrote more than a share of a slot
};

}  // namespace phalanx
