// Which way long payloads go, and in which order copies are made, without Python. Run under the sanitizers by `make sanitize`.

#include <cstddef>
#include <cstdio>
#include <utility>
#include <vector>

#include "check.hpp"
#include "phalanx/lending.hpp"
#include "phalanx/turns.hpp"

using namespace phalanx;

namespace {

constexpr std::size_t bytes = 1 << 20;

// How many of so many choices are loans, if each way takes so long.
int loans_of(QuickerWay& way, int choices, std::int64_t loan_ns, std::int64_t ring_ns) {
    int loans = 0;
    for (int i = 0; i < choices; ++i) {
        const bool loan = way.is_loan();
        way.note(loan, bytes, loan ? loan_ns : ring_ns, true);
        loans += loan ? 1 : 0;
    }
    return loans;
}

// Each way is tried first, then the quicker one is taken.
void the_quicker_way() {
    QuickerWay loan, ring;
    CHECK(loan.is_loan());
    loan.note(true, bytes, 1000, true);
    CHECK(!loan.is_loan());
    loan.note(false, bytes, 2000, true);
    CHECK(loan.is_loan());
    CHECK(loans_of(loan, 1000, 1000, 2000) > 950);
    CHECK(loans_of(ring, 1000, 2000, 1000) < 50);
}

// The slower one is tried again, the more rarely the slower it is: that costs a hundredth in the long run.
void tries_of_the_slower_way() {
    for (const int times : {2, 4, 9}) {
        QuickerWay way;
        loans_of(way, 4000, 1000 * times, 1000);
        const int tries = loans_of(way, 8000, 1000 * times, 1000);
        CHECK(tries >= 1);
        CHECK(tries * (times - 1) <= 8000 / 100 + times);
    }
    QuickerWay alike;
    CHECK(loans_of(alike, 1600, 1001, 1000) >= 1600 / 16 - 2);
}

// It notices within some thousand payloads that the other way is quicker now, and within some dozen that its own is slower.
void it_changes_its_mind() {
    QuickerWay way;
    loans_of(way, 8000, 9000, 1000);
    loans_of(way, 4000, 500, 1000);
    CHECK(loans_of(way, 1000, 500, 1000) > 900);
    loans_of(way, 64, 9000, 1000);
    CHECK(loans_of(way, 1000, 9000, 1000) < 100);
}

// Of what did not go wholly, the rest takes as long again.
void a_part() {
    QuickerWay way;
    way.note(true, bytes, 1000, false);
    way.note(false, bytes, 1500, true);
    CHECK(!way.is_loan());
}

void pieces_by_turns() {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{99}, std::size_t{100}, std::size_t{101}, std::size_t{1000}}) {
        std::vector<std::pair<std::size_t, std::size_t>> forwards, backwards;
        each_piece(size, 100, false, [&](std::size_t from, std::size_t count) { forwards.emplace_back(from, count); });
        each_piece(size, 100, true, [&](std::size_t from, std::size_t count) { backwards.emplace_back(from, count); });
        std::size_t end = 0;
        for (const auto& [from, count] : forwards) {
            CHECK(from == end && count > 0 && count <= 100);
            end = from + count;
        }
        CHECK(end == size);
        CHECK(std::vector(backwards.rbegin(), backwards.rend()) == forwards);
    }
    CHECK(backward_piece(1) == 128 << 10);
    CHECK(backward_piece(64 << 20) == 4 << 20);
}

}  // namespace

int main() {
    the_quicker_way();
    tries_of_the_slower_way();
    it_changes_its_mind();
    a_part();
    pieces_by_turns();
    std::printf("lending: %d checks\n", checks.load());
    return failures.load() == 0 ? 0 : 1;
}
