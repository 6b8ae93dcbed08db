// How a rank waits for another where it cannot know who else wants its core: look again, give the core away, or sleep.
//
// To be woken on a core that has gone idle costs some microseconds on bare metal and up to a hundred on a virtual machine,
// so looking again is better as long as nothing else needs the core. Nobody says whether something does; a yield that comes
// back late shows it. Then yielding is the worst choice, because it costs a whole time slice, and sleeping is cheap: the
// core does not go idle, and a sleeper that is woken goes before whatever is busy. It may be the very rank that is waited
// for that needs this core. So the rank looks for about as long as an answer takes that is on its way, and sleeps.
//
// Where ranks share cores and one only receives again and again, what it waits for comes from a rank that runs ahead: it
// rests for a while, finds several messages then, and nobody has to change places or wake it for each. The more it finds the
// longer it rests: once so much is under way that the other side's window is full, the kernel sends many messages as one.
//
// With a core for itself, such a rank turns away from the connection for a moment before it waits for what comes, and for a longer
// one as long as that finds several operations close together: every look takes the connection's lock, and the sender's own call
// waits for that. Two are not several: ranks that need each other's answers are up to one operation ahead.
//
// `WaitPolicy` and `Wait` are pure logic: whoever uses them says what time it is.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "phalanx/waiting.hpp"

namespace phalanx {

// What the waits of one lane have learnt. Not for two threads at once.
class WaitPolicy {
public:
    static constexpr std::int64_t shortest_ns = 50'000;    // about what being woken on an idle core costs
    static constexpr std::int64_t contended_ns = 10'000;     // about what an answer takes
    static constexpr std::int64_t longest_ns = 1'000'000;  // of looking, however often it has paid off
    static constexpr std::int64_t long_yield_ns = 50'000;
    // Where ranks share a core: another rank that computes for a moment is no stranger, but a whole time slice is one's.
    static constexpr std::int64_t long_yield_oversubscribed_ns = 500'000;
    static constexpr std::int64_t first_pause_ns = 10'000'000;  // without yields, after a long one
    static constexpr std::int64_t longest_pause_ns = 1'000'000'000;
    static constexpr std::int64_t shortest_rest_ns = 100'000;
    static constexpr std::int64_t longest_rest_ns = 800'000;  // also of all rests in one wait
    static constexpr std::int64_t shortest_away_ns = 20'000;
    static constexpr std::int64_t longest_away_ns = 100'000;
    static constexpr std::int64_t close_ns = 8'000;  // between operations that are close together
    static constexpr int several = 3;   // operations
    static constexpr int long_run = 8;  // operations that only received, from which on more are expected
    static constexpr int longest_run = 1000;

    explicit WaitPolicy(bool oversubscribed) noexcept : oversubscribed_(oversubscribed) {}

    // True if something else was seen on this core lately.
    bool contended(std::int64_t now) const noexcept { return now < contended_until_; }

    // How long a wait that begins now would look before it sleeps.
    std::int64_t patience_ns(std::int64_t now) const noexcept {
        if (!contended(now)) return patience_ns_;
        return oversubscribed_ ? 0 : contended_ns;
    }

    // A yield took so long.
    void yielded(std::int64_t before, std::int64_t now) noexcept {
        if (now - before <= (oversubscribed_ ? long_yield_oversubscribed_ns : long_yield_ns)) return;
        const bool again = before - contended_until_ < pause_ns_;  // the last pause was too short
        pause_ns_ = again ? std::min(2 * pause_ns_, longest_pause_ns) : first_pause_ns;
        contended_until_ = now + pause_ns_;
    }

    // An operation is over, in which this rank has only received, or not.
    void ended(bool only_received) noexcept {
        run_ = only_received ? std::min(run_ + 1, long_run) : 0;
        if (only_received) {
            received();
        } else {
            rest_ns_ = away_ns_ = 0;
            until_turn_ = next_turn_;
        }
    }

    // A message has come, which may be one of many; for those this rank turns away, but does not rest.
    void received() noexcept {
        since_rest_ = std::min(since_rest_ + 1, longest_run);
        until_turn_ = std::max(until_turn_ - 1, 0);
    }

    // A wait begins: how often to rest in it. A rest is longer than the one before if that has found many operations.
    int rests() noexcept {
        if (!oversubscribed_ || run_ < long_run) return 0;
        rest_ns_ = since_rest_ < long_run ? shortest_rest_ns : std::clamp(2 * rest_ns_, shortest_rest_ns, longest_rest_ns);
        since_rest_ = 0;
        return static_cast<int>(longest_rest_ns / rest_ns_);
    }

    std::int64_t rest_ns() const noexcept { return rest_ns_; }

    // A wait for what comes begins: for how long to turn away first, which may be not at all. If that finds too few operations, it
    // takes twice as many of them until the next try.
    std::int64_t turn_away(std::int64_t now) noexcept {
        if (oversubscribed_ || until_turn_ > 0 || contended(now)) return 0;
        const int found = since_rest_;
        since_rest_ = 0;
        if (found < several) {
            next_turn_ = until_turn_ = std::min(2 * next_turn_, longest_run);
            return away_ns_ = 0;
        }
        if (away_ns_ > 0) next_turn_ = long_run;
        const bool close = found * close_ns >= away_ns_;
        return away_ns_ = std::clamp(close ? 2 * away_ns_ : away_ns_ / 2, shortest_away_ns, longest_away_ns);
    }

    // A wait is over: would looking all the time have been worth it?
    void waited(std::int64_t ns) noexcept {
        patience_ns_ = ns <= longest_ns ? std::min(2 * patience_ns_, longest_ns) : std::max(patience_ns_ / 2, shortest_ns);
    }

private:
    bool oversubscribed_;
    std::int64_t patience_ns_ = longest_ns;
    std::int64_t pause_ns_ = first_pause_ns;
    std::int64_t contended_until_ = -longest_pause_ns;
    std::int64_t rest_ns_ = 0;
    std::int64_t away_ns_ = 0;   // of the last time that it turned away
    int run_ = 0;                // how many of the last operations have only received, up to `long_run`
    int since_rest_ = 0;         // the same since it rested or turned away, up to `longest_run`
    int until_turn_ = long_run;  // how many have to follow each other before it may turn away
    int next_turn_ = long_run;   // the same for the next run
};

// One wait, from the first look that found nothing to the first that finds something.
class Wait {
public:
    enum class Next : int { look, yield, sleep, rest, turn_away };

    explicit Wait(WaitPolicy& policy) noexcept : policy_(policy) {}

    // A look has found nothing: what to do before the next one. `receives`: nothing of this rank's is still to be sent.
    Next next(std::int64_t now, bool receives) noexcept {
        if (!waits_) {
            waits_ = true;
            began_ = now;
            rests_ = policy_.rests();
            away_ns_ = receives ? policy_.turn_away(now) : 0;
            if (away_ns_ > 0) return Next::turn_away;
        }
        if (rests_ > 0) {
            --rests_;
            return Next::rest;
        }
        if (now - began_ >= policy_.patience_ns(now)) return Next::sleep;
        return policy_.contended(now) ? Next::look : Next::yield;
    }

    void yielded(std::int64_t before, std::int64_t now) noexcept { policy_.yielded(before, now); }

    bool waits() const noexcept { return waits_; }

    void ended(bool only_received) noexcept { policy_.ended(only_received); }
    void received() noexcept { policy_.received(); }

    std::int64_t rest_ns() const noexcept { return policy_.rest_ns(); }
    std::int64_t away_ns() const noexcept { return away_ns_; }

    // A look has found something.
    void end(std::int64_t now) noexcept {
        waits_ = false;
        policy_.waited(now - began_);
    }

private:
    WaitPolicy& policy_;
    bool waits_ = false;
    std::int64_t began_ = 0;
    std::int64_t away_ns_ = 0;
    int rests_ = 0;
};

// A look has found nothing: does what comes before the next one. False if it is time to sleep. `receives`: as in `Wait::next`,
// for those that are one of many operations.
inline bool look_again(Wait& wait, bool receives = false) noexcept {
    const std::int64_t now = monotonic_ns();
    switch (wait.next(now, receives)) {
        case Wait::Next::look: relax(); return true;
        case Wait::Next::yield:
            sched_yield();
            wait.yielded(now, monotonic_ns());
            return true;
        case Wait::Next::rest: {
            const timespec span{0, wait.rest_ns()};
            nanosleep(&span, nullptr);
            return true;
        }
        case Wait::Next::turn_away:
            while (monotonic_ns() < now + wait.away_ns()) relax();
            return true;
        case Wait::Next::sleep: break;
    }
    return false;
}

}  // namespace phalanx
