// The calls of a process group of torch that are as simple as most are: nothing watches torch, the tensors are plain, and
// nothing else is under way. They go from torch's function to the group's fast path in one step. Everything else is
// declined with None, before anything has happened, and phalanx/torch_backend does it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "call_site.hpp"
#include "flat_tensor.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "phalanx/waiting.hpp"
#include "torch_options.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

nb::object vectorcall(nb::handle callable, std::initializer_list<PyObject*> arguments) {
    const nb::object result = in_interpreter(
        [&] { return nb::steal(PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr)); });
    if (!result.is_valid()) throw nb::python_error();
    return result;
}

// What is the same for all groups of a process.
class TorchAccess {
public:
    // `watchers` are functions that say 0, False or None where nothing watches. `finished(tensors)` makes the handle of an
    // operation that is done.
    TorchAccess(const TensorReader& reader, const OptionsReader& options, std::vector<nb::object> watchers, nb::object finished)
        : reader(reader), options(options), watchers_(std::move(watchers)), finished_(std::move(finished)) {}

    bool is_watched() const {
        for (const nb::object& watcher : watchers_) {
            const nb::object answer = vectorcall(watcher, {});
            if (answer.ptr() == Py_False || answer.is_none()) continue;
            if (!PyLong_CheckExact(answer.ptr()) || PyLong_AsLong(answer.ptr()) != 0) return true;
        }
        return false;
    }

    nb::object finished(nb::handle tensors) const { return vectorcall(finished_, {tensors.ptr()}); }

    const TensorReader& reader;
    const OptionsReader& options;
    OptionsKind all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, barrier;

private:
    std::vector<nb::object> watchers_;
    nb::object finished_;
};

// A collective that is ready to run: the name of the Group's method, and its arguments.
class PreparedCall {
public:
    PreparedCall(nb::object group, nb::object verb, std::array<nb::object, 3> arguments, nb::object tensors, std::size_t size)
        : group_(std::move(group)), verb_(std::move(verb)), arguments_(std::move(arguments)), tensors(std::move(tensors)), size(size) {}

    // None: declined, nothing has happened.
    nb::object on_fast_path() const {
        const nb::object fast_path = nb::getattr(group_, names().fast_path);
        if (fast_path.is_none()) return nb::none();
        std::array<PyObject*, 4> all{fast_path.ptr()};
        std::size_t count = 1;
        for (const nb::object& argument : arguments_)
            if (argument.is_valid()) all[count++] = argument.ptr();
        nb::object result =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(verb_.ptr(), all.data(), count, nullptr)); });
        if (!result.is_valid()) throw nb::python_error();
        return result;
    }

    // Runs it, in whatever thread, for the place that has asked for it. If it has waited for its turn for longer than
    // `patience`, that counts: it may take what is left of `limit`, else as long as the group's own timeout says. All seconds.
    void run(double patience, double limit) const {
        const Lent lent(site_);
        const double waited = static_cast<double>(monotonic_ns() - issued_ns_) * 1e-9;
        if (waited <= patience && !on_fast_path().is_none()) return;
        nb::object seconds = nb::none();
        if (waited > patience) seconds = nb::float_(std::max(limit - waited, 0.0));
        std::array<PyObject*, 5> all{group_.ptr()};
        std::size_t count = 1;
        for (const nb::object& argument : arguments_)
            if (argument.is_valid()) all[count++] = argument.ptr();
        all[count] = seconds.ptr();
        const nb::object result = in_interpreter([&] {
            return nb::steal(PyObject_VectorcallMethod(verb_.ptr(), all.data(), count, names().timeout.ptr()));
        });
        if (!result.is_valid()) throw nb::python_error();
    }

    // For one that does not run at once: the place that asks for it, and the time.
    void note_caller() {
        site_ = CallSite::current();
        issued_ns_ = monotonic_ns();
    }

private:
    struct Names {
        nb::object fast_path = nb::steal(PyUnicode_InternFromString("_fast_path"));
        nb::object timeout = nb::make_tuple("timeout");
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    struct Lent {
        explicit Lent(const CallSite& site) : before(std::exchange(CallSite::lent(), &site)) {}
        ~Lent() { CallSite::lent() = before; }
        Lent(const Lent&) = delete;
        Lent& operator=(const Lent&) = delete;
        const CallSite* const before;
    };

    nb::object group_, verb_;
    std::array<nb::object, 3> arguments_;
    CallSite site_;
    std::int64_t issued_ns_ = 0;

public:
    nb::object tensors;  // those that the operation changes
    std::size_t size;    // in bytes
};

class TorchCalls {
public:
    // `group` does the work. `lines` are pairs of a line and the lock of its turn: of the collectives, of messages to others,
    // and of messages from others.
    // `buffered`: bytes up to which a message is sent even if no receiver waits for it.
    TorchCalls(const TorchAccess& torch, nb::object group, nb::list lines, std::size_t buffered)
        : torch_(torch), group_(std::move(group)), buffered_(buffered) {
        for (nb::handle pair : lines) lines_.push_back({nb::object(pair[0]), nb::getattr(nb::object(pair[1]), "locked")});
        world_size_ = nb::cast<int>(group_.attr("world_size"));
    }

    bool closed = false;     // everything is declined
    bool takes_gpu = false;  // tensors on a GPU are not

    nb::object all_reduce(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.all_reduce, options, asked) || !look_one(tensors, flat) || !is_reducible(flat, asked)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.all_reduce, {made(flat), asked.op, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object broadcast(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.broadcast, options, asked) || !look_one(tensors, flat)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.broadcast, {made(flat), asked.root, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object reduce(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.reduce, options, asked) || !look_one(tensors, flat) || !is_reducible(flat, asked)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.reduce, {made(flat), asked.root, asked.op}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object all_gather(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.all_gather, options, asked) || !look_both(output, whole, input, part)) return nb::none();
        if (whole.count != part.count * world_size_) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, verbs_.all_gather, {made(part), made(whole), {}}, listed(output), size}, on_gpu);
    }

    nb::object reduce_scatter(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.reduce_scatter, options, asked) || !look_both(output, part, input, whole)) return nb::none();
        if (whole.count != part.count * world_size_ || !is_reducible(whole, asked)) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, verbs_.reduce_scatter, {made(whole), asked.op, made(part)}, listed(output), size}, on_gpu);
    }

    // Only of parts of one size.
    nb::object all_to_all(nb::handle output, nb::handle input, nb::handle output_sizes, nb::handle input_sizes, nb::handle options) {
        CallOptions asked;
        FlatTensor target, source;
        if (!is_empty(output_sizes) || !is_empty(input_sizes) || !reads(torch_.all_to_all, options, asked)) return nb::none();
        if (!look_both(output, target, input, source) || target.count != source.count || !divides(target) || !divides(source))
            return nb::none();
        const std::size_t size = source.bytes();
        const bool on_gpu = source.gpu >= 0;
        return run(asked, {group_, verbs_.all_to_all, {made(source), made(target), {}}, listed(output), size}, on_gpu);
    }

    nb::object barrier(nb::handle options) {
        CallOptions asked;
        if (!reads(torch_.barrier, options, asked)) return nb::none();
        return run(asked, {group_, verbs_.barrier, {}, nb::list(), 0});
    }

    // A short message. The handle of one that is done; otherwise what FastMessages says of one that goes on.
    nb::object send(nb::handle tensors, nb::handle dst, nb::handle tag) {
        FlatTensor flat;
        if (!is_open() || !look_one(tensors, flat) || flat.gpu >= 0 || flat.bytes() > buffered_ || !lines_[1].idle())
            return nb::none();
        const nb::object messages = nb::getattr(group_, fast_messages_);
        if (messages.is_none()) return nb::none();
        const nb::object array = made(flat);
        PyObject* const arguments[] = {messages.ptr(), array.ptr(), dst.ptr(), tag.ptr()};
        nb::object answer =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(send_.ptr(), arguments, 4, nullptr)); });
        if (!answer.is_valid()) {
            nb::python_error raised;
            in_interpreter([&] { return group_.attr("_take_back")(); });
            throw raised;
        }
        if (answer.ptr() == Py_True) return torch_.finished(tensors);
        return answer.ptr() == Py_False ? nb::none() : answer;
    }

    // The memory to receive to: the call must not wait for a message.
    nb::object recv(nb::handle tensors, nb::handle, nb::handle) {
        FlatTensor flat;
        if (!is_open() || !look_one(tensors, flat) || flat.gpu >= 0) return nb::none();
        return made(flat);
    }

private:
    struct Line {
        nb::object waiting;
        nb::object is_locked;

        // Nothing is in line, or has just been taken from it.
        bool idle() const {
            return PyObject_Size(waiting.ptr()) == 0 && vectorcall(is_locked, {}).ptr() == Py_False;
        }
    };
    struct Verbs {
        nb::object all_reduce = interned("all_reduce"), broadcast = interned("broadcast"), reduce = interned("reduce"),
                   all_gather = interned("all_gather"), reduce_scatter = interned("reduce_scatter"),
                   all_to_all = interned("all_to_all"), barrier = interned("barrier");
    };
    static nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

    bool is_open() const { return !closed && !torch_.is_watched(); }

    bool reads(const OptionsKind& kind, nb::handle options, CallOptions& asked) const {
        return is_open() && torch_.options.read(kind, options, asked);
    }

    bool look_one(nb::handle tensors, FlatTensor& found) const {
        return PyList_CheckExact(tensors.ptr()) && NB_LIST_GET_SIZE(tensors.ptr()) == 1 &&
               torch_.reader.look(NB_LIST_GET_ITEM(tensors.ptr(), 0), found, takes_gpu);
    }

    bool look_both(nb::handle one, FlatTensor& found, nb::handle other, FlatTensor& other_found) const {
        return torch_.reader.look(one, found, takes_gpu) && torch_.reader.look(other, other_found, takes_gpu) &&
               found.dtype == other_found.dtype && found.gpu == other_found.gpu;
    }

    bool divides(const FlatTensor& flat) const noexcept { return flat.rows >= 0 && flat.rows % world_size_ == 0; }

    static bool is_empty(nb::handle sizes) noexcept { return PyList_CheckExact(sizes.ptr()) && NB_LIST_GET_SIZE(sizes.ptr()) == 0; }

    // Whether the group's reduction on this memory is all that there is to do. Elements that lie there as another dtype are
    // not reduced as that one, and a mean of integers is rounded as torch does it.
    bool is_reducible(const FlatTensor& flat, const CallOptions& asked) const noexcept {
        return !flat.is_stand_in && (asked.op.ptr() != mean_.ptr() || flat.is_floating);
    }

    static nb::object made(FlatTensor& flat) { return nb::cast(std::move(flat)); }

    static nb::object listed(nb::handle tensor) {
        nb::list one;
        one.append(tensor);
        return one;
    }

    // The handle of an operation that is done, the call for later, or None.
    nb::object run(const CallOptions& asked, PreparedCall&& call, bool on_gpu = false) const {
        if (asked.later && on_gpu) return nb::none();
        if (asked.later) {
            call.note_caller();
            return nb::cast(std::move(call));
        }
        if (!lines_[0].idle() || call.on_fast_path().is_none()) return nb::none();
        return torch_.finished(call.tensors);
    }

    const TorchAccess& torch_;
    nb::object group_;
    const std::size_t buffered_;
    std::vector<Line> lines_;
    Verbs verbs_;
    nb::object fast_messages_ = interned("_fast_messages"), send_ = interned("send"), mean_ = interned("mean");
    int world_size_ = 0;
};

}  // namespace

void phalanx::bind_torch_calls(nb::module_& m) {
    static PyType_Slot buffer[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(FlatTensor::get_buffer)}, {0, nullptr}};
    nb::class_<FlatTensor>(m, "FlatTensor", nb::type_slots(buffer), "The memory of a tensor, as a flat array.");
    nb::class_<TensorReader>(m, "TensorReader", "Finds the memory of torch's tensors.")
        .def(nb::init<std::vector<nb::object>, nb::object, nb::object, const nb::list&>(), nb::arg("types"),
             nb::arg("exchange_api"), nb::arg("is_neg"), nb::arg("dtypes"))
        .def(
            "look",
            [](const TensorReader& reader, nb::handle tensor) {
                FlatTensor found;
                return reader.look(tensor, found) ? nb::cast(std::move(found)) : nb::none();
            },
            nb::arg("tensor").none())
        .def("layout", &TensorReader::layout, nb::arg("tensors"), "Where tensors lie, to be compared.");
    nb::class_<OptionsKind>(m, "OptionsKind", "One of torch's classes of options.")
        .def(nb::init<nb::object, bool, bool>(), nb::arg("kind"), nb::arg("has_op"), nb::arg("has_root"));
    nb::class_<OptionsReader>(m, "OptionsReader", "Reads the options of torch's calls.")
        .def(nb::init<nb::object, const nb::list&>(), nb::arg("unset"), nb::arg("reductions"));
    nb::class_<TorchAccess>(m, "TorchAccess", "How a group's fast calls see torch.")
        .def(nb::init<const TensorReader&, const OptionsReader&, std::vector<nb::object>, nb::object>(), nb::arg("reader"),
             nb::arg("options"), nb::arg("watchers"), nb::arg("finished"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def_rw("all_reduce", &TorchAccess::all_reduce)
        .def_rw("broadcast", &TorchAccess::broadcast)
        .def_rw("reduce", &TorchAccess::reduce)
        .def_rw("all_gather", &TorchAccess::all_gather)
        .def_rw("reduce_scatter", &TorchAccess::reduce_scatter)
        .def_rw("all_to_all", &TorchAccess::all_to_all)
        .def_rw("barrier", &TorchAccess::barrier);
    nb::class_<PreparedCall>(m, "PreparedCall", "A collective that is ready to run; see phalanx.torch_backend.fast_calls.")
        .def_ro("tensors", &PreparedCall::tensors)
        .def_ro("size", &PreparedCall::size)
        .def("__call__", &PreparedCall::run, nb::arg("patience"), nb::arg("limit"));
    nb::class_<TorchCalls>(m, "TorchCalls", "The simple calls of a process group of torch; see phalanx.torch_backend.fast_calls.")
        .def(nb::init<const TorchAccess&, nb::object, nb::list, std::size_t>(), nb::arg("torch"), nb::arg("group"), nb::arg("lines"),
             nb::arg("buffered"), nb::keep_alive<1, 2>())
        .def_rw("closed", &TorchCalls::closed)
        .def_rw("takes_gpu", &TorchCalls::takes_gpu)
        .def("allreduce", &TorchCalls::all_reduce, nb::arg().none(), nb::arg().none())
        .def("broadcast", &TorchCalls::broadcast, nb::arg().none(), nb::arg().none())
        .def("reduce", &TorchCalls::reduce, nb::arg().none(), nb::arg().none())
        .def("all_gather_single", &TorchCalls::all_gather, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter_single", &TorchCalls::reduce_scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_to_all_single", &TorchCalls::all_to_all, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none())
        .def("barrier", &TorchCalls::barrier, nb::arg().none())
        .def("send", &TorchCalls::send, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("recv", &TorchCalls::recv, nb::arg().none(), nb::arg().none(), nb::arg().none());
}
