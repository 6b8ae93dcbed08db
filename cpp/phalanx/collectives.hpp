// The collectives inside a segment: those that move data (moves.hpp) and those that combine them (sums.hpp), and how they end.
// What they are made of, and why nobody reads what another is writing, is told in exchange.hpp.
#pragma once

#include <vector>

#include "moves.hpp"
#include "sums.hpp"

namespace phalanx {

class Collectives : public Sums {
public:
    explicit Collectives(Segment& segment) : Sums(segment) {}

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
};

}  // namespace phalanx
