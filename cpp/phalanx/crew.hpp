// Threads that share a long piece of work with the one that has it, where the ranks of a machine leave cores free: one core
// copies less in a second than the memory could give.
//
// They are made when they are first needed, sleep while there is nothing to do (or look for more a moment longer, if work came
// soon after other work of late), and end with the crew. Whoever has the work does it, too, and waits for nobody who has not
// begun: a helper that gets no core costs nothing. Helpers compute as the one whom they help: with its rounding, and its way
// with denormal numbers.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "waiting.hpp"

namespace phalanx {

class Crew {
public:
    static constexpr int largest = 16;

    explicit Crew(int helpers) noexcept : most_(std::clamp(helpers, 0, largest)), trusted_(most_) {}
    ~Crew() {
        dismiss();
        if (threads_ == nullptr) return;
        if (owner_ != getpid())
            threads_.release();  // a forked child has no such threads, and cannot even let go of them
        else
            for (std::thread& thread : *threads_) thread.join();
    }
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    int helpers() const noexcept { return most_; }
    // How many of them work on so many bytes is worth, if it is worth one from `worth` on. To call one costs the caller time:
    // the first few are worth it sooner than the others.
    int helpers_for(std::size_t bytes, std::size_t worth) const noexcept { return helpers_for(bytes, worth, most_); }
    static int helpers_for(std::size_t bytes, std::size_t worth, int most) noexcept {
        if (bytes < worth) return 0;
        const std::size_t soon = std::min(2 * bytes / worth - 1, few);
        return static_cast<int>(std::min(std::max(soon, bytes / worth - 1), static_cast<std::size_t>(most)));
    }
    // How long the pieces of so many bytes are for so many of them: short enough for all to be done at about the same time, and not
    // too short for the kernel.
    static std::size_t piece_of(std::size_t bytes, int helpers, std::size_t worth) noexcept {
        const std::size_t shortest = worth / 8;
        const std::size_t each = std::clamp(bytes / (8 * (static_cast<std::size_t>(helpers) + 1)), shortest, 4 * shortest);
        return (each + 63) / 64 * 64;
    }

    // Lets the threads end, also while one has work for them, which then does the rest alone. There will be no others.
    void dismiss() noexcept {
        over_.store(true, std::memory_order_seq_cst);
        bell_.wake();
    }

    // Calls `work(piece, hand)` once for each piece, in this thread, whose hand is 0, and in up to so many others. Each hand has a
    // lot of pieces that follow each other, the same ones the next time, forwards and backwards by turns (turns.hpp): its core has
    // them in its cache, and nobody else's has. Who is done with its own takes on those of others. Returns when all are done.
    // `work` must not throw.
    template <class Work>
    void share(std::size_t pieces, int helpers, Work& work) {
        const int wanted = static_cast<int>(std::min<std::size_t>(std::min({helpers, most_, trusted_}), pieces > 0 ? pieces - 1 : 0));
        hired_ = wanted > 0 && may_call() ? hire(wanted) : 0;
        if (hired_ == 0) {
            for (std::size_t piece = 0; piece < pieces; ++piece) work(piece, 0);
            return;
        }
        do_piece_ = [](void* given, std::size_t piece, int hand) { (*static_cast<Work*>(given))(piece, hand); };
        work_ = &work;
        deal_out(pieces);
        arithmetic_ = arithmetic();
        const std::int64_t since = monotonic_ns();
        note_pause(since - ended_);
        turn_.store(++turns_, std::memory_order_seq_cst);
        if (const std::uint32_t asleep = bell_.sleepers.load(std::memory_order_seq_cst) & hired_; asleep != 0) bell_.wake(asleep);
        do_pieces(0);
        turn_.store(0, std::memory_order_seq_cst);
        wait_for_those_inside(since);
        ended_ = monotonic_ns();
    }

private:
    static constexpr std::size_t few = 3;
    // Who waited longer for a helper to finish its piece, and longer than a part of what its own took, calls half as many the next
    // time: others want the cores. If it was one, none, and if that goes on, twice as often as the time before, up to so many
    // times. After so many times without a wait, it calls twice as many again.
    static constexpr std::int64_t late_ns = 300'000;
    static constexpr std::int64_t late_part = 4;
    static constexpr int most_rests = 16;
    static constexpr int good_turns = 8;
    // A helper that sleeps comes late to work of some hundred microseconds. So after each it looks so long for more, if one of the
    // last few times more had come by then.
    static constexpr std::int64_t soon_ns = 100'000;
    static constexpr int last_few = 4;
    static constexpr std::int64_t long_ns = std::int64_t{3600} * 1'000'000'000;

    bool may_call() noexcept {
        if (rest_ == 0) return true;
        --rest_;
        return false;
    }

    void note_pause(std::int64_t ns) noexcept {
        hopes_ = ns < soon_ns ? last_few : std::max(hopes_ - 1, 0);
        looks_on_.store(hopes_ > 0, std::memory_order_relaxed);
    }

    // The bits of so many helpers on the bell; of fewer if there are no more threads, or no memory for them.
    std::uint32_t hire(int wanted) noexcept {
        if (over_.load(std::memory_order_seq_cst)) return 0;
        if (threads_ == nullptr) {
            threads_.reset(new (std::nothrow) std::vector<std::thread>);
            owner_ = getpid();
        }
        if (threads_ == nullptr || owner_ != getpid()) return 0;
        if (static_cast<int>(threads_->size()) < wanted) hire_more(wanted);
        const auto hired = static_cast<unsigned>(std::min(wanted, most_));
        return (std::uint32_t{1} << hired) - 1;
    }

    void hire_more(int wanted) noexcept {
        // Signals go to the program's own threads, but for those that a thread has made itself: they end the program, and whoever
        // handles them says where.
        sigset_t most, before;
        sigfillset(&most);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&most, own);
        pthread_sigmask(SIG_SETMASK, &most, &before);
        try {
            threads_->reserve(static_cast<std::size_t>(wanted));
            while (static_cast<int>(threads_->size()) < wanted) {
                const int hand = static_cast<int>(threads_->size()) + 1;
                threads_->emplace_back([this, hand] { help(hand); });
                pthread_setname_np(threads_->back().native_handle(), "phalanx-crew");
            }
        } catch (const std::exception&) {
            most_ = static_cast<int>(threads_->size());
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // How this thread computes with floating-point numbers.
    using Arithmetic = std::uint64_t;
    static Arithmetic arithmetic() noexcept {
#if defined(__aarch64__)
        Arithmetic word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
#elif defined(__x86_64__)
        return _mm_getcsr() & ~x86_flags;
#else
        return 0;
#endif
    }
    static void compute_as(Arithmetic word) noexcept {
        if (word == arithmetic()) return;
#if defined(__aarch64__)
        asm volatile("msr fpcr, %0" : : "r"(word));
#elif defined(__x86_64__)
        _mm_setcsr(static_cast<unsigned>(word));
#endif
    }
    static constexpr unsigned x86_flags = 0x3f;  // what has happened so far, beside how to compute

    void help(int hand) noexcept {
        const std::uint32_t bit = std::uint32_t{1} << (hand - 1);
        std::uint64_t seen = 0;
        while (!over_.load(std::memory_order_seq_cst)) {
            const std::uint64_t turn = turn_.load(std::memory_order_seq_cst);
            if (turn == 0 || turn == seen) {
                sleep_until_called(bit, seen);
                continue;
            }
            seen = turn;
            // In this order: who is inside is waited for, unless it finds that the turn was over before.
            inside_.fetch_add(1, std::memory_order_seq_cst);
            if (turn_.load(std::memory_order_seq_cst) == turn && (hired_ & bit) != 0) {
                compute_as(arithmetic_);
                do_pieces(hand);
            }
            inside_.fetch_sub(1, std::memory_order_seq_cst);
            if (looks_on_.load(std::memory_order_relaxed)) look_for_more(seen);
        }
    }

    void sleep_until_called(std::uint32_t bit, std::uint64_t seen) noexcept {
        // In this order: whoever has work by now sees that this thread may sleep, or this thread sees the work.
        const std::uint32_t word = bell_.word.load(std::memory_order_seq_cst);
        bell_.sleepers.fetch_or(bit, std::memory_order_seq_cst);
        const std::uint64_t turn = turn_.load(std::memory_order_seq_cst);
        if ((turn == 0 || turn == seen) && !over_.load(std::memory_order_seq_cst)) detail::sleep_on(bell_, word, long_ns, bit);
        bell_.sleepers.fetch_and(~bit, std::memory_order_seq_cst);  // to wake one that is awake would cost a system call
    }

    void look_for_more(std::uint64_t seen) const noexcept {
        const std::int64_t until = monotonic_ns() + soon_ns;
        for (int looks = 1; !over_.load(std::memory_order_relaxed); ++looks) {
            const std::uint64_t turn = turn_.load(std::memory_order_relaxed);
            if (turn != 0 && turn != seen) return;
            relax();
            if (looks % 64 != 0) continue;
            sched_yield();  // others may want the core
            if (monotonic_ns() > until) return;
        }
    }

    struct alignas(64) Lot {
        Shared<std::size_t> taken{0};
        std::size_t begin = 0;
        std::size_t pieces = 0;
    };

    void deal_out(std::size_t pieces) noexcept {
        hands_ = static_cast<std::size_t>(std::popcount(hired_)) + 1;
        for (std::size_t hand = 0; hand < hands_; ++hand) {
            lots_[hand].taken.store(0, std::memory_order_relaxed);
            lots_[hand].begin = pieces * hand / hands_;
            lots_[hand].pieces = pieces * (hand + 1) / hands_ - lots_[hand].begin;
        }
    }

    void do_pieces(int hand) noexcept {
        const bool backwards = turns_ % 2 == 1;
        for (std::size_t i = 0; i < hands_; ++i) {
            Lot& lot = lots_[(static_cast<std::size_t>(hand) + i) % hands_];
            for (;;) {
                const std::size_t k = lot.taken.fetch_add(1, std::memory_order_relaxed);
                if (k >= lot.pieces) break;
                do_piece_(work_, lot.begin + (backwards ? lot.pieces - 1 - k : k), hand);
            }
        }
    }

    // `since`: when this thread began with its own pieces.
    void wait_for_those_inside(std::int64_t since) noexcept {
        const std::int64_t done = monotonic_ns();
        for (int looks = 1; inside_.load(std::memory_order_seq_cst) != 0; ++looks) {
            relax();
            if (looks % 64 == 0) sched_yield();
        }
        judge(monotonic_ns() - done > std::max(late_ns, (done - since) / late_part));
    }

    void judge(bool late) noexcept {
        if (!late) {
            next_rest_ = 1;
            if (trusted_ == most_ || ++good_ < good_turns) return;
            trusted_ = std::min(2 * trusted_ + 1, most_);
        } else if (trusted_ > 1) {
            trusted_ /= 2;
        } else {
            rest_ = next_rest_;
            next_rest_ = std::min(2 * next_rest_, most_rests);
        }
        good_ = 0;
    }

    int most_;
    std::unique_ptr<std::vector<std::thread>> threads_;
    pid_t owner_ = 0;    // the process that has them
    int trusted_;        // so many are called at most
    int good_ = 0;       // so many times none of them was late
    int rest_ = 0;       // so many times it does without helpers
    int next_rest_ = 1;  // and so many if they are late once more
    std::int64_t ended_ = 0;  // when the last work was done
    int hopes_ = 0;           // so many pauses more that are not short until helpers sleep at once
    std::uint64_t turns_ = 0;
    // The work of this turn: written before the turn is shown, and not changed while anybody is inside.
    void (*do_piece_)(void*, std::size_t, int) = nullptr;
    void* work_ = nullptr;
    std::uint32_t hired_ = 0;  // who may take part, by their bits on the bell
    std::size_t hands_ = 1;    // so many they are, with the one that has the work
    Arithmetic arithmetic_ = 0;
    Bell bell_;
    std::array<Lot, largest + 1> lots_;  // one for each hand
    alignas(64) Shared<std::uint64_t> turn_{0};  // 0: there is nothing to do
    Shared<int> inside_{0};
    Shared<bool> over_{false};
    Shared<bool> looks_on_{false};
};

}  // namespace phalanx
