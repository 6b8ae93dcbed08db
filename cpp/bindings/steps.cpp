// The steps of a schedule over TCP for Python; see phalanx.group.engines.steps.fast_path.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "module.hpp"
#include "steps_run.hpp"

namespace nb = nanobind;

namespace phalanx {

void bind_steps(nb::module_& m) {
    nb::class_<Plan>(m, "Plan", "The steps of a schedule; see phalanx.group.engines.steps.fast_path.")
        .def(nb::init<const std::vector<int>&>(), nb::arg("numbers"));
    nb::class_<WaitPolicy>(m, "WaitPolicy", "How the ranks of a lane wait for each other; see cpp/phalanx/wait_policy.hpp.")
        .def(nb::init<bool>(), nb::arg("oversubscribed"))
        .def("contended", &WaitPolicy::contended, nb::arg("now"))
        .def("patience_ns", &WaitPolicy::patience_ns, nb::arg("now"))
        .def("yielded", &WaitPolicy::yielded, nb::arg("before"), nb::arg("now"))
        .def("waited", &WaitPolicy::waited, nb::arg("ns"))
        .def("ended", &WaitPolicy::ended, nb::arg("only_received"))
        .def("received", &WaitPolicy::received)
        .def("turn_away", &WaitPolicy::turn_away, nb::arg("now"))
        .def_prop_ro("rest_ns", &WaitPolicy::rest_ns);
    nb::class_<Wait>(m, "Wait", "One wait, as the policy has it: 0 look again, 1 give the core away, 2 sleep, 3 rest, 4 turn away.")
        .def(nb::init<WaitPolicy&>(), nb::arg("policy"), nb::keep_alive<1, 2>())
        .def("next", [](Wait& wait, std::int64_t now, bool receives) { return static_cast<int>(wait.next(now, receives)); },
             nb::arg("now"), nb::arg("receives"))
        .def("yielded", &Wait::yielded, nb::arg("before"), nb::arg("now"))
        .def("end", &Wait::end, nb::arg("now"));
    nb::class_<Run>(m, "StepsRun", "A schedule under way; see phalanx.group.engines.steps.fast_path.")
        .def(nb::init<const Plan&, nb::list, nb::list, const std::vector<int>&, const std::vector<int>&, std::uint64_t, int,
                      int, WaitPolicy&>(),
             nb::arg("plan"), nb::arg("chunks"), nb::arg("sources"), nb::arg("out"), nb::arg("into"), nb::arg("fingerprint"),
             nb::arg("dtype"), nb::arg("op"), nb::arg("policy"), nb::keep_alive<1, 10>())
        .def("move", &Run::move, nb::arg("piece"))
        .def_prop_ro("where", &Run::where)
        .def_prop_ro("error", &Run::error)
        .def("sends_to", &Run::sends_to, nb::arg("channel"))
        .def("receives_from", &Run::receives_from, nb::arg("channel"))
        .def("halfway", &Run::halfway, nb::arg("channel"))
        .def("refused", &Run::refused);
}

}  // namespace phalanx
