// phalanx._core: converts arguments, lets go of the GIL where that pays, and calls the headers. Nothing is decided here.

#include "module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "phalanx/jitter.hpp"
#include "recorder.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// No other thread runs meanwhile, so nobody sees that the collector is off; see phalanx.thread_frames for why it is.
class WithoutCollector {
public:
    WithoutCollector() : was_on_(PyGC_Disable() != 0) {}
    ~WithoutCollector() {
        if (was_on_) PyGC_Enable();
    }
    WithoutCollector(const WithoutCollector&) = delete;
    WithoutCollector& operator=(const WithoutCollector&) = delete;

private:
    bool was_on_;
};

nb::object thread_frames() {
    const nb::object current_frames = nb::module_::import_("sys").attr("_current_frames");
    const WithoutCollector off;
    return current_frames();
}

}  // namespace

void phalanx::bind_call_site(nb::module_& m) {
    nb::class_<CallSite>(m, "CallSite", "A place in the user's program; see phalanx.group.tracking.call_site.")
        .def_prop_ro("code", &CallSite::code)
        .def_prop_ro("line", &CallSite::line);
    m.def("call_site", [] { return CallSite::current(); }, "What this thread works for, or where it is.");
    m.def(
        "lend_call_site", [](const CallSite* site) { CallSite::lent() = site; }, "site"_a.none(),
        "What this thread does from now on is done for that place. The caller keeps it until it says None.");
    m.def("add_library", &CallSite::add_library, "path"_a, "installed"_a);
    m.def("thread_frames", &thread_frames, "The frame of each thread, by its identifier.");
    m.def(
        "thread_stack",
        [](std::uint64_t thread) {
            nb::list stack;
            const WithoutCollector off;
            const nb::object frames = thread_frames();
            nb::object frame = nb::steal(PyObject_CallMethod(frames.ptr(), "get", "K", thread));
            for (; frame.is_valid() && !frame.is_none(); frame = frame.attr("f_back")) stack.append(frame);
            return stack;
        },
        "The frames of a thread, the innermost first.");
}

void phalanx::bind_recorder(nb::module_& m) {
    nb::class_<SlateWriter>(m, "SlateWriter", "Writes to the slate of this process; see phalanx.slate.")
        .def("__init__",
             [](SlateWriter* self, int fd) {
                 try {
                     new (self) SlateWriter(fd);
                 } catch (const std::system_error& error) {
                     errno = error.code().value();
                     PyErr_SetFromErrno(PyExc_OSError);
                     throw nb::python_error();
                 }
             })
        .def_prop_ro("memory", &SlateWriter::memory)
        .def("begin",
             [](SlateWriter& slate, std::uint32_t group, nb::str verb, const CallSite& site, std::int32_t peer, std::uint64_t bytes,
                std::uint64_t sequence, std::uint64_t fingerprint) {
                 PyObject* text = verb.release().ptr();
                 PyUnicode_InternInPlace(&text);  // so that the same verb is the same text
                 const nb::object kept = nb::steal(text);
                 const SlateWriter::Place place = slate.begin(group, PyUnicode_AsUTF8AndSize(text, nullptr), site, peer, bytes,
                                                              sequence, fingerprint, monotonic_ns());
                 return nb::make_tuple(place.number, place.site, place.bytes, place.began_ns);
             })
        .def("end",
             [](SlateWriter& slate, const std::tuple<std::uint64_t, std::uint32_t, std::uint64_t, std::int64_t>& place,
                bool failed) {
                 const auto [number, site, bytes, began] = place;
                 slate.end({number, bytes, began, site}, monotonic_ns(), failed);
             },
             "place"_a, "failed"_a = false);
    nb::class_<Recorder>(m, "Recorder", "The last operations of the fast paths; see phalanx.group.tracking.journal.")
        .def(nb::init<SlateWriter*, std::uint32_t>(), "slate"_a.none() = nb::none(), "group"_a = 0, nb::keep_alive<1, 2>())
        .def_rw("sequence", &Recorder::sequence)
        .def("records", &Recorder::records);
}

NB_MODULE(_core, m) {
    m.attr("__doc__") = "The native core. Use phalanx._native, which works without it too.";
    // The caller compares this with the codes it uses, so that a stale build is refused instead of computing nonsense.
    m.attr("ABI") = 15;
    // A thread that never ends may hold a group when the program does: nothing that nanobind should speak of.
    nb::set_leak_warnings(false);
    phalanx::bind_call_site(m);
    phalanx::bind_recorder(m);
    phalanx::bind_lifeline(m);
    phalanx::bind_machine(m);
    phalanx::bind_reduce(m);
    phalanx::bind_ring(m);
    phalanx::bind_mpi_messages(m);
    phalanx::bind_packing(m);
    phalanx::bind_posted_work(m);
    phalanx::bind_frame_pipe(m);
    phalanx::bind_segment(m);
    phalanx::bind_copies(m);
    phalanx::bind_device(m);
    phalanx::bind_fast_path(m);
    phalanx::bind_steps(m);
    phalanx::bind_fast_steps(m);
    phalanx::bind_torch_calls(m);
    phalanx::bind_torch_methods(m);
    phalanx::bind_verb_methods(m);
#if defined(PHALANX_JITTER)
    m.def("seed_jitter", &phalanx::jitter::seed, "seed"_a,
          "From now on this process pauses as the seed says; 0: not at all. Only in the build of `make jitter`.");
#endif
}
