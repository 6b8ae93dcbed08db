// What this machine can do, for Python; see cpp/phalanx/machine.hpp. All times are in seconds.

#include "phalanx/machine.hpp"

#include <nanobind/nanobind.h>

#include "gil.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

namespace {

Effort effort_of(int rounds, double budget) { return {rounds, static_cast<std::int64_t>(budget * 1e9)}; }

void need(bool valid) {
    if (!valid) throw nb::value_error("such a measurement does not exist");
}

double movement(std::size_t bytes, int reads, int writes, bool in_place, int mover, int threads, int rounds,
                double budget) {
    need(bytes > 0 && reads > 0 && writes > 0 && threads > 0 && mover >= 0 && mover <= static_cast<int>(Mover::ahead));
    const WithoutGil released;
    return time_movement({bytes, reads, writes, in_place}, static_cast<Mover>(mover), threads, effort_of(rounds, budget));
}

nb::tuple copies(std::size_t bytes, int threads, int rounds, double budget) {
    need(bytes > 0 && threads > 0);
    std::array<double, 5> seconds;
    {
        const WithoutGil released;
        seconds = time_copies(bytes, threads, effort_of(rounds, budget));
    }
    return nb::make_tuple(seconds[0], seconds[1], seconds[2], seconds[3], seconds[4]);
}

double all_reduce(std::size_t bytes, int ranks, std::size_t slot, std::size_t reduced_by_all, int spins, int yields,
                  int calls, int rounds, double budget) {
    need(ranks > 1 && ranks < 1024 && slot >= page && calls > 0);
    const WithoutGil released;
    return time_all_reduce(bytes, Layout{ranks, slot, 0}, Patience{spins, yields}, Thresholds{reduced_by_all}, calls,
                           effort_of(rounds, budget));
}

double gather(std::size_t bytes, int ranks, std::size_t slot, std::size_t copy_once_from, int spins, int yields, int calls,
              int rounds, double budget) {
    need(bytes > 0 && ranks > 1 && ranks < 1024 && slot >= page && calls > 0);
    const WithoutGil released;
    const Thresholds thresholds{
        .copy_once_from = copy_once_from, .gather_at_home_from = 0, .gather_in_pieces_from = Thresholds::never};
    return time_gather(bytes, Layout{ranks, slot, 0}, Patience{spins, yields}, thresholds, calls, effort_of(rounds, budget));
}

}  // namespace

void phalanx::bind_machine(nb::module_& m) {
    m.def("time_movement", &movement, "size"_a, "reads"_a, "writes"_a, "in_place"_a, "mover"_a, "threads"_a, "rounds"_a,
          "budget"_a);
    m.def("time_copies", &copies, "size"_a, "threads"_a, "rounds"_a, "budget"_a);
    m.def("time_all_reduce", &all_reduce, "size"_a, "ranks"_a, "slot_bytes"_a, "reduced_by_all"_a, "spins"_a, "yields"_a,
          "calls"_a, "rounds"_a, "budget"_a);
    m.def("time_gather", &gather, "size"_a, "ranks"_a, "slot_bytes"_a, "copy_once_from"_a, "spins"_a, "yields"_a, "calls"_a,
          "rounds"_a, "budget"_a);
    m.def("time_look", [](int rounds, double budget) {
        const WithoutGil released;
        return time_look(effort_of(rounds, budget));
    }, "rounds"_a, "budget"_a);
    m.def("time_wake_up", [](int times, double budget) {
        const WithoutGil released;
        return time_wake_up(times, static_cast<std::int64_t>(budget * 1e9));
    }, "times"_a, "budget"_a);
}
