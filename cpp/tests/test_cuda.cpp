// The plans of kernels on a GPU, the right to write, and when a GPU counts as busy. No driver is needed for any of it.

#include <cstdio>
#include <vector>

#include "check.hpp"
#include "phalanx/cuda/collectives.hpp"

using namespace phalanx;
using namespace phalanx::cuda;

namespace {

bool same(const Piece& piece, const std::vector<Address>& inputs, const std::vector<Address>& outputs, std::size_t elements) {
    return piece.inputs == inputs && piece.outputs == outputs && piece.elements == elements;
}

void test_pieces() {
    const std::vector<Address> sources{100, 200}, targets{300, 400};
    const std::vector<std::size_t> counts{4, 8}, matrix{4, 8, 12, 16};
    Operation o{Kind::all_reduce, 100, 20};
    o.how.dtype = Dtype::float32;
    std::vector<Piece> found = pieces_of(o, sources, sources);
    CHECK(found.size() == 1 && same(found[0], {100, 200}, {100, 200}, 5));
    o.kind = Kind::reduce;
    o.root = 1;
    found = pieces_of(o, sources, sources);
    CHECK(found.size() == 1 && same(found[0], {100, 200}, {200}, 5));
    o.kind = Kind::broadcast;
    found = pieces_of(o, {100, 200, 300}, {});
    CHECK(found.size() == 1 && same(found[0], {200}, {100, 300}, 20));
    o.kind = Kind::reduce_scatter;
    o.target_bytes = 20;
    found = pieces_of(o, sources, targets);
    CHECK(found.size() == 2 && same(found[0], {100, 200}, {300}, 5) && same(found[1], {120, 220}, {400}, 5));
    o.kind = Kind::all_gather;
    o.counts = Lengths(counts);
    found = pieces_of(o, {100, 204}, {100, 200});  // what lies at its place already stays
    CHECK(found.size() == 2 && same(found[0], {100}, {200}, 4) && same(found[1], {204}, {104}, 8));
    o.kind = Kind::gather;
    found = pieces_of(o, sources, {0, 300});
    CHECK(found.size() == 2 && same(found[0], {100}, {300}, 4) && same(found[1], {200}, {304}, 8));
    o.kind = Kind::all_to_all;
    o.counts = Lengths(matrix);
    found = pieces_of(o, sources, targets);
    CHECK(found.size() == 4 && same(found[0], {100}, {300}, 4) && same(found[1], {104}, {400}, 8) &&
          same(found[2], {200}, {304}, 12) && same(found[3], {212}, {408}, 16));
    o.kind = Kind::scatter;  // from rank 1
    o.counts = Lengths(counts);
    found = pieces_of(o, {0, 200}, targets);
    CHECK(found.size() == 2 && same(found[0], {200}, {300}, 4) && same(found[1], {204}, {400}, 8));
    found = pieces_of(o, {0, 200}, {0, 204});  // a rank that takes nothing, and a part that lies at its place
    CHECK(found.empty());
}

void test_widening() {
    const auto widened = [](Address from, Address to, std::size_t bytes, std::size_t elements) {
        std::vector<Piece> pieces{{{from}, {to}, bytes}};
        const Dtype dtype = widen(pieces);
        CHECK(pieces[0].elements == elements);
        return dtype;
    };
    CHECK(widened(0, 16, 16, 2) == Dtype::uint64);
    CHECK(widened(0, 20, 16, 4) == Dtype::uint32);
    CHECK(widened(2, 16, 6, 3) == Dtype::uint16);
    CHECK(widened(0, 16, 15, 15) == Dtype::uint8);
}

void test_launches() {
    std::vector<Piece> pieces(150, Piece{{16}, {32}, 5});
    pieces.push_back({{16}, {}, 5});
    pieces.push_back({{16}, {32}, 0});
    std::vector<Launch> made = launches_of(pieces, Dtype::uint8, {}, 7);
    CHECK(made.size() == 3 && made[0].pieces == 64 && made[1].pieces == 64 && made[2].pieces == 22 && made[0].blocks == 1);
    CHECK(made[2].plan.closed == 7 && made[2].plan.rows[21].first == 42 && made[2].plan.rows[21].aligned == 1);
    const std::vector<Address> many(150, 8);
    made = launches_of({{many, many, 4097}, {many, many, 1}}, Dtype::float32, {Dtype::float32, Op::max, 2}, 7);
    CHECK(made.size() == 2 && made[0].pieces == 1 && made[0].blocks == 5 && made[0].plan.rows[0].aligned == 0);
    CHECK(made[0].plan.divisor == 2.0 && made[0].plan.op == static_cast<std::uint32_t>(Op::max));
}

void test_pace() {
    Pace pace(1'000'000);
    pace.executed(1 << 20, 20'000);
    CHECK(!pace.busy());
    for (const int operations : {4, 8}) {  // it is believed for longer each time
        pace.executed(1 << 20, 5'000'000);
        for (int i = 0; i < operations; ++i) {
            CHECK(pace.busy());
            pace.went_round();
        }
        CHECK(!pace.busy());
    }
    pace.executed(std::size_t{1} << 32, 4'000'000);  // so much takes so long
    CHECK(!pace.busy());
}

void test_pace_of_short_arrays() {
    Pace pace(1'000'000);
    const auto rounds = [&] {
        int count = 0;
        for (; !pace.idle(); ++count) pace.short_went_round();
        return count;
    };
    CHECK(rounds() == 16);
    pace.executed(4, 20'000);
    CHECK(pace.idle());
    pace.executed(4, 300'000);  // it had to wait for the kernels of the other ranks, though for no time slice
    CHECK(!pace.busy() && rounds() == 100);
    pace.executed(4, 4'500'000);
    CHECK(pace.busy() && !pace.idle());
    for (int i = 0; i < 4; ++i) pace.went_round();
    CHECK(rounds() == 1500);
    pace.cannot_open_short();
    CHECK(rounds() == 1024);
}

void test_flight() {
    Shared<std::uint32_t> state{0};
    Flight mine(state, 0), others(state, 0);
    CHECK(mine.begin());
    mine.end();
    bool told = false;
    others.give_up([&] { told = true; });
    CHECK(!told);  // no kernel was under way
    CHECK(!mine.begin());
    state.store(0);
    CHECK(mine.begin());
    others.give_up([&] {
        told = true;
        mine.end();
    });
    CHECK(told && !mine.begin());
}

}  // namespace

int main() {
    test_pieces();
    test_widening();
    test_launches();
    test_pace();
    test_pace_of_short_arrays();
    test_flight();
    std::printf("%d checks, %d failures\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
