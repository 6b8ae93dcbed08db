// The operations of a process group of torch, and `wait` of their handles, as methods that are no Python functions: each tries the
// group's fast calls, or what these have prepared, and calls the Python method only for the rest.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "interned.hpp"
#include "method_like.hpp"
#include "module.hpp"
#include "torch_calls.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

using Arguments = PyObject* const*;

struct FastCall {
    const char* name;
    int count;  // of arguments that torch's own functions pass
    nb::object (*call)(TorchCalls&, Arguments);
};

constexpr FastCall fast_calls[] = {
    {"allreduce", 2, [](TorchCalls& calls, Arguments a) { return calls.all_reduce(a[0], a[1]); }},
    {"broadcast", 2, [](TorchCalls& calls, Arguments a) { return calls.broadcast(a[0], a[1]); }},
    {"reduce", 2, [](TorchCalls& calls, Arguments a) { return calls.reduce(a[0], a[1]); }},
    {"all_gather_single", 3, [](TorchCalls& calls, Arguments a) { return calls.all_gather(a[0], a[1], a[2]); }},
    {"reduce_scatter_single", 3, [](TorchCalls& calls, Arguments a) { return calls.reduce_scatter(a[0], a[1], a[2]); }},
    {"all_to_all_single", 5, [](TorchCalls& calls, Arguments a) { return calls.all_to_all(a[0], a[1], a[2], a[3], a[4]); }},
    {"allgather", 3, [](TorchCalls& calls, Arguments a) { return calls.all_gather_list(a[0], a[1], a[2]); }},
    {"reduce_scatter", 3, [](TorchCalls& calls, Arguments a) { return calls.reduce_scatter_list(a[0], a[1], a[2]); }},
    {"alltoall", 3, [](TorchCalls& calls, Arguments a) { return calls.all_to_all_list(a[0], a[1], a[2]); }},
    {"gather", 3, [](TorchCalls& calls, Arguments a) { return calls.gather_list(a[0], a[1], a[2]); }},
    {"scatter", 3, [](TorchCalls& calls, Arguments a) { return calls.scatter_list(a[0], a[1], a[2]); }},
    {"barrier", 1, [](TorchCalls& calls, Arguments a) { return calls.barrier(a[0]); }},
    {"send", 3, [](TorchCalls& calls, Arguments a) { return calls.send(a[0], a[1], a[2]); }},
    {"recv", 3, [](TorchCalls& calls, Arguments a) { return calls.recv(a[0], a[1], a[2]); }},
};

struct Names {
    nb::str fast_calls = interned("fast_calls"), go_on_with = interned("go_on_with"), opts = interned("opts"), call = interned("_call");
};

// Made by the first method and never freed, as the interpreter's own names.
const Names& names() {
    static const Names* const all = new Names;
    return *all;
}

// What a method knows: which of the fast calls it is.
struct Known {
    explicit Known(nb::handle function) {
        const auto name = nb::cast<std::string>(nb::object(function.attr("__name__")));
        fast = std::find_if(std::begin(fast_calls), std::end(fast_calls), [&](const FastCall& one) { return name == one.name; });
        if (fast == std::end(fast_calls)) throw nb::value_error("not an operation that has a fast call");
    }

    const FastCall* fast = nullptr;
};

using TorchMethod = MethodLike<Known>;  // `on_error` returns the error to raise in its stead

// Whether all arguments are there, as torch's own functions pass them: in order, or as for `barrier` one by its name.
bool are_usual(const FastCall& fast, Py_ssize_t count, PyObject* kwnames) {
    if (kwnames == nullptr) return count == fast.count;
    return fast.count == 1 && count == 0 && PyTuple_Size(kwnames) == 1 && PyTuple_GetItem(kwnames, 0) == names().opts.ptr();
}

// Not valid if the call was declined.
nb::object do_fast(const FastCall& fast, PyObject* group, Arguments args) {
    static const nb::handle type = nb::type<TorchCalls>();
    const nb::object calls = nb::getattr(nb::handle(group), names().fast_calls);
    if (reinterpret_cast<PyObject*>(Py_TYPE(calls.ptr())) != type.ptr()) return {};
    nb::object work = fast.call(*nb::inst_ptr<TorchCalls>(calls), args);
    if (work.is_none()) return {};
    if (!PyTuple_CheckExact(work.ptr())) return work;
    PyObject* const all[] = {group, work.ptr()};  // a message that goes on
    work = in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(names().go_on_with.ptr(), all, 2, nullptr)); });
    if (!work.is_valid()) throw nb::python_error();
    return work;
}

// Has the error that is set raised as torch's users expect it.
void translate(PyObject* on_error) {
    nb::python_error raised;
    PyObject* const value = raised.value().ptr();
    if (raised.traceback().is_valid()) PyException_SetTraceback(value, raised.traceback().ptr());
    PyObject* const shown = PyObject_CallFunctionObjArgs(on_error, value, nullptr);
    if (shown == nullptr) return;  // the handler of a signal has raised: that goes first, as everywhere
    PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(shown))), shown, PyException_GetTraceback(shown));
}

PyObject* call_method(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* kwnames) {
    const TorchMethod* const method = TorchMethod::of(self);
    const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    const auto call = [&]() -> PyObject* {
        if (count > 0 && are_usual(*method->own->fast, count - 1, kwnames)) {
            nb::object work = do_fast(*method->own->fast, args[0], args + 1);
            if (work.is_valid()) return work.release().ptr();
        }
        return PyObject_Vectorcall(method->function, args, nargsf, kwnames);
    };
    return raising(call, [&] { translate(method->on_error); });
}

// `wait` of a handle that the core has made.
struct NothingMore {
    explicit NothingMore(nb::handle) {}
};
using WaitMethod = MethodLike<NothingMore>;  // `on_error` is not called: what the operation raises, Python raises

// What the core has set in a handle. The field of a class is looked up once, in those classes that the core makes.
nb::object call_of(nb::handle handle) {
    struct Field {
        nb::object type, field;
        descrgetfunc get;
    };
    static auto* const known = new std::vector<Field>;  // outlives the interpreter
    const nb::handle type = reinterpret_cast<PyObject*>(Py_TYPE(handle.ptr()));
    for (const Field& one : *known)
        if (one.type.ptr() == type.ptr()) return nb::steal(one.get(one.field.ptr(), handle.ptr(), type.ptr()));
    const nb::object field = nb::getattr(type, names().call);
    auto* const get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(field.ptr()), Py_tp_descr_get));
    if (get != nullptr && known->size() < 2) known->push_back({nb::borrow(type), field, get});
    return nb::getattr(handle, names().call);
}

bool has_ended_well(nb::handle handle) {
    static const nb::handle collective = nb::type<PreparedCall>(), message = nb::type<PreparedMessage>();
    const nb::object call = call_of(handle);
    if (!call.is_valid()) throw nb::python_error();
    const PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(call.ptr()));
    if (type == collective.ptr()) return nb::inst_ptr<PreparedCall>(call)->wait(handle);
    return type == message.ptr() && nb::inst_ptr<PreparedMessage>(call)->wait(handle);
}

PyObject* wait(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* kwnames) {
    const auto call = [&] {
        if (PyVectorcall_NARGS(nargsf) == 1 && kwnames == nullptr && has_ended_well(args[0])) return Py_NewRef(Py_True);
        return PyObject_Vectorcall(WaitMethod::of(self)->function, args, nargsf, kwnames);
    };
    return raising(call, [] {});
}

}  // namespace

void phalanx::bind_torch_methods(nb::module_& m) {
    m.attr("WaitMethod") = WaitMethod::type<wait>("phalanx._core.WaitMethod");
    m.attr("TorchMethod") = TorchMethod::type<call_method>("phalanx._core.TorchMethod");
    nb::list known;
    for (const FastCall& one : fast_calls) known.append(one.name);
    m.attr("TORCH_OPERATIONS") = nb::tuple(known);
}
