// Work of messages that stand in line: what the core has to know of it, how it is made, and `wait` as a method that is no Python
// function.

#include "posted_work.hpp"

#include <structmember.h>

#include <new>

#include "gil.hpp"
#include "interned.hpp"
#include "message_line.hpp"
#include "method_like.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// The base of its classes in Python, so that its fields are read as those of any structure.
struct Posted {
    PyObject_HEAD
    PyObject *group, *prepared, *result, *line;  // null stands for None
    char done;

    static Posted* of(nb::handle work) noexcept { return reinterpret_cast<Posted*>(work.ptr()); }

    static int clear(PyObject* self) {
        Py_CLEAR(of(self)->group);
        Py_CLEAR(of(self)->prepared);
        Py_CLEAR(of(self)->result);
        Py_CLEAR(of(self)->line);
        return 0;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        Py_VISIT(of(self)->group);
        Py_VISIT(of(self)->prepared);
        Py_VISIT(of(self)->result);
        Py_VISIT(of(self)->line);
        return 0;
    }

    static void forget(PyObject* self) {
        PyObject_GC_UnTrack(self);
        clear(self);
        PyTypeObject* const type = Py_TYPE(self);
        reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
        Py_DECREF(type);
    }

    static nb::object type() {
        static PyMemberDef members[] = {
            {"_group", T_OBJECT, offsetof(Posted, group), 0, nullptr},   {"_prepared", T_OBJECT, offsetof(Posted, prepared), 0, nullptr},
            {"_result", T_OBJECT, offsetof(Posted, result), 0, nullptr}, {"_line", T_OBJECT, offsetof(Posted, line), 0, nullptr},
            {"_done", T_BOOL, offsetof(Posted, done), 0, nullptr},       {nullptr, 0, 0, 0, nullptr},
        };
        static PyType_Slot slots[] = {
            {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
            {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
            {Py_tp_clear, reinterpret_cast<void*>(clear)},
            {Py_tp_members, members},
            {0, nullptr},
        };
        static PyType_Spec spec{"phalanx._core.Posted", sizeof(Posted), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                slots};
        nb::object made = nb::steal(PyType_FromSpec(&spec));
        if (!made.is_valid()) throw nb::python_error();
        return made;
    }
};

struct Names {
    nb::str backend = interned("_backend"), forked = interned("forked"), messages = interned("_messages"), prepared = interned("prepared"),
            append = interned("append"), popleft = interned("popleft"), remove = interned("remove"), begin = interned("begin"),
            run = interned("run"), take_back = interned("_take_back_prepared"), timeout = interned("timeout");
};

// Made by the first call and never freed, as the interpreter's own names.
const Names& names() {
    static const Names* const all = new Names;
    return *all;
}

// The core waits for no more than a moment, and then leaves a message to the general way: a wait that may last so long is its own.
constexpr double moment = 0.1;

struct NothingMore {
    explicit NothingMore(nb::handle) {}
};
using PostedWait = MethodLike<NothingMore>;  // `on_error` has the message go on, and hides Phalanx's frames

template <class... More>
nb::object call(const nb::str& method, nb::handle object, More... more) {
    PyObject* const all[] = {object.ptr(), more.ptr()...};
    nb::object answer = in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(method.ptr(), all, 1 + sizeof...(more), nullptr)); });
    if (!answer.is_valid()) throw nb::python_error();
    return answer;
}

// Without the hook for attributes that a group has not.
nb::object ask(nb::handle object, const nb::str& name) {
    nb::object found = nb::steal(PyObject_GenericGetAttr(object.ptr(), name.ptr()));
    if (!found.is_valid()) throw nb::python_error();
    return found;
}

// Whether this process is a copy of the group's, which may not use it.
bool is_forked(nb::handle group) { return ask(ask(group, names().backend), names().forked).ptr() != Py_False; }

// Null for a message through MPI.
PreparedChannelMessage* of_a_channel(nb::handle prepared) {
    static const nb::handle type = nb::type<PreparedChannelMessage>();
    return reinterpret_cast<PyObject*>(Py_TYPE(prepared.ptr())) == type.ptr() ? nb::inst_ptr<PreparedChannelMessage>(prepared) : nullptr;
}

bool run(nb::handle prepared) {
    if (PreparedChannelMessage* const one = of_a_channel(prepared)) return one->run();
    return call(names().run, prepared).ptr() == Py_True;
}

// As UnpostedWork._end.
void note_end(nb::handle work) {
    const nb::object line = nb::borrow(Posted::of(work)->line);
    Posted::of(work)->done = 1;
    Py_CLEAR(Posted::of(work)->group);
    Py_CLEAR(Posted::of(work)->prepared);
    const nb::object first = nb::steal(PySequence_GetItem(line.ptr(), 0));
    if (first.is(work)) {
        call(names().popleft, line);
        return;
    }
    PyErr_Clear();  // none stands there, or another one does
    try {
        call(names().remove, line, work);
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_ValueError)) throw;
    }
}

// Whether the message has ended, in this thread. False too if it was left to the general way.
bool move(nb::handle work) {
    const nb::object group = nb::borrow(Posted::of(work)->group), prepared = nb::borrow(Posted::of(work)->prepared);
    if (!group.is_valid() || group.is_none() || !prepared.is_valid() || prepared.is_none()) return false;
    if (is_forked(group) || !run(prepared)) return false;
    note_end(work);
    return true;
}

// Whether it is a wait that may last long; null: for as long as the message may.
bool is_long(PyObject* timeout) {
    if (timeout == nullptr || timeout == Py_None) return true;
    if (PyFloat_Check(timeout) == 0 && PyLong_Check(timeout) == 0) return false;
    const double seconds = PyFloat_AsDouble(timeout);
    if (PyErr_Occurred() == nullptr) return seconds > moment;
    PyErr_Clear();
    return false;
}

// Has `on_error` see to the work, with the error that is set, which is then raised.
void go_on_without(PyObject* on_error, PyObject* work) {
    nb::python_error raised;
    PyObject* const value = raised.value().ptr();
    if (raised.traceback().is_valid()) PyException_SetTraceback(value, raised.traceback().ptr());
    const nb::object done = nb::steal(PyObject_CallFunctionObjArgs(on_error, work, value, nullptr));
    if (!done.is_valid()) return;  // the handler of another signal has raised: that goes first, as everywhere
    PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(value))), Py_NewRef(value), PyException_GetTraceback(value));
}

nb::handle posted_type() {
    static const nb::handle type = Posted::type().release();  // lives as long as the module, which is never unloaded
    return type;
}

PyObject* wait(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* kwnames) {
    const PostedWait* const method = PostedWait::of(self);
    const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    const bool is_named = kwnames != nullptr && PyTuple_Size(kwnames) == 1 && PyTuple_GetItem(kwnames, 0) == names().timeout.ptr();
    const bool is_usual = kwnames == nullptr ? count == 1 || count == 2 : count == 1 && is_named;
    if (!is_usual || PyObject_TypeCheck(args[0], reinterpret_cast<PyTypeObject*>(posted_type().ptr())) == 0)
        return PyObject_Vectorcall(method->function, args, nargsf, kwnames);
    const auto call = [&]() -> PyObject* {
        if (is_long(is_named || count == 2 ? args[1] : nullptr) && move(args[0])) {
            PyObject* const result = Posted::of(args[0])->result;
            return Py_NewRef(result != nullptr ? result : Py_None);
        }
        return PyObject_Vectorcall(method->function, args, nargsf, kwnames);
    };
    return raising(call, [&] { go_on_without(method->on_error, args[0]); });
}

}  // namespace

nb::object phalanx::stand_in_line(nb::handle type, nb::handle group, nb::handle prepared, nb::handle result) {
    if (is_forked(group)) return {};
    const nb::object line = ask(ask(group, names().messages), names().prepared);
    nb::object work = nb::steal(PyObject_CallNoArgs(type.ptr()));
    if (!work.is_valid()) throw nb::python_error();
    Posted& posted = *Posted::of(work);
    posted.group = Py_NewRef(group.ptr());
    posted.prepared = Py_NewRef(prepared.ptr());
    posted.result = Py_NewRef(result.ptr());
    posted.line = Py_NewRef(line.ptr());
    try {
        call(names().append, line, work);  // before another thread can hear the answer
        if (PreparedChannelMessage* const one = of_a_channel(prepared))
            one->begin();
        else
            call(names().begin, prepared);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    } catch (const nb::python_error&) {  // Ctrl-C: no caller will ever wait for it. Or MPI has refused it
        call(names().take_back, group, work, prepared);
        throw;
    }
    return work;
}

void phalanx::bind_posted_work(nb::module_& m) {
    m.attr("Posted") = posted_type();
    m.attr("PostedWait") = PostedWait::type<wait>("phalanx._core.PostedWait");
}
