// The verbs of a group as methods that are no Python functions: each tries the group's fast path, and calls the Python method
// only for what that declines.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <string>

#include "collective_calls.hpp"
#include "interned.hpp"
#include "method_like.hpp"
#include "module.hpp"
#include "posted_work.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

enum class Message : int { send, recv, sendrecv, isend, irecv };
constexpr const char* message_names[] = {"send", "recv", "sendrecv", "isend", "irecv"};
constexpr const char* fast_names[] = {"send", "recv", "exchange", "post_send", "prepare_receive"};  // of the fast path's methods
constexpr int messages = 5;

// What a verb takes, and where its fast path is.
struct Signature {
    static constexpr int most = 4;

    explicit Signature(nb::handle function);

    nb::str name;
    nb::str attribute;  // of the group: its fast path
    nb::str fast_name;  // of the method there
    int count = 0;      // of arguments that need not be named
    int required = 0;
    std::array<nb::str, most> names;
    std::array<nb::object, most> defaults;
    bool is_message = false;
    bool is_posted = false;  // a message that the call does not wait for
    int verb = 0;            // a Verb or a Message
    mutable PyTypeObject* known = nullptr;  // of the last fast path; only compared
    mutable bool knows = false;             // whether that has the method
};

// The arguments of one call. What was not given is its default.
struct Arguments {
    std::array<PyObject*, Signature::most> given{};
    PyObject* timeout = Py_None;
    PyObject* tag = nullptr;  // of a message; null for 0
    bool later = false;       // it is asynchronous
};

struct Names {
    nb::str timeout = interned("timeout"), async_op = interned("async_op"), tag = interned("tag"), take_back = interned("_take_back"),
            go_on_sending = interned("_go_on_sending"), go_on_receiving = interned("_go_on_receiving"), sent = interned("_sent"),
            receive_work = interned("_receive_work"), send_work = interned("_send_work"), worker = interned("_worker"), take = interned("take");
    nb::int_ zero = nb::int_(0);
};

// Made by the first method and never freed, as the interpreter's own names.
const Names& names() {
    static const Names* const all = new Names;
    return *all;
}

using VerbMethod = MethodLike<Signature>;  // `on_error` hides Phalanx's frames

// False for a call that the fast path does not know: the Python method says what is wrong, or knows better.
bool read(const Signature& signature, PyObject* const* args, Py_ssize_t count, PyObject* kwnames, Arguments& found) {
    if (count > signature.count) return false;
    std::copy_n(args, count, found.given.begin());
    const Py_ssize_t named = kwnames == nullptr ? 0 : PyTuple_Size(kwnames);
    for (Py_ssize_t i = 0; i < named; ++i) {
        // Names in a program's text are interned; any other way to write them goes the Python method's way.
        PyObject* const name = PyTuple_GetItem(kwnames, i);
        PyObject* const value = args[count + i];
        if (name == names().timeout.ptr()) {
            found.timeout = value;
        } else if (name == names().async_op.ptr()) {
            if (signature.is_posted || (value != Py_False && value != Py_True)) return false;
            found.later = value == Py_True;
        } else if (signature.is_message && name == names().tag.ptr()) {
            found.tag = value;
        } else {
            int place = 0;
            while (place < signature.count && name != signature.names[place].ptr()) ++place;
            if (place == signature.count || found.given[place] != nullptr) return false;
            found.given[place] = value;
        }
    }
    for (int i = 0; i < signature.count; ++i) {
        if (found.given[i] != nullptr) continue;
        if (i < signature.required) return false;
        found.given[i] = signature.defaults[i].ptr();
    }
    return true;
}

nb::object by_core(CollectiveCalls& calls, const Signature& signature, const Arguments& a) {
    return calls.call(static_cast<Verb>(signature.verb), {a.given[0], a.given[1], a.given[2]}, a.timeout, a.later);
}

// The method of that name of a fast path that is not the core's own, with the same arguments.
nb::object by_name(const Signature& signature, nb::handle fast, const Arguments& a) {
    std::array<PyObject*, Signature::most + 3> all{fast.ptr()};
    std::size_t count = 1;
    for (int i = 0; i < signature.count; ++i) all[count++] = a.given[i];
    if (signature.is_message) all[count++] = a.tag != nullptr ? a.tag : names().zero.ptr();
    all[count++] = a.timeout;
    nb::object answer = nb::steal(PyObject_VectorcallMethod(signature.fast_name.ptr(), all.data(), count, nullptr));
    if (!answer.is_valid()) throw nb::python_error();
    return answer;
}

// Issues an asynchronous collective, and has the group's worker queue it. Not valid if it was declined, or if the group has no
// worker yet: its first one is made by the Python method.
nb::object issue(CollectiveCalls& calls, const Signature& signature, nb::handle group, const Arguments& a) {
    const nb::object worker = nb::steal(PyObject_GenericGetAttr(group.ptr(), names().worker.ptr()));
    if (!worker.is_valid()) throw nb::python_error();
    const TurnHeld turn(calls.turn());
    if (worker.is_none() || !turn.taken) return {};
    const nb::object issued = by_core(calls, signature, a);
    if (issued.is_none()) return {};
    PyObject* const all[] = {worker.ptr(), signature.name.ptr(), issued.ptr(), group.ptr()};
    nb::object work = in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(names().take.ptr(), all, 4, nullptr)); });
    if (!work.is_valid()) throw nb::python_error();
    return work;
}

// Not valid if the fast path has declined it.
nb::object collective(const Signature& signature, nb::handle group, nb::handle fast, const Arguments& a) {
    const auto verb = static_cast<Verb>(signature.verb);
    const bool needs_out = verb == Verb::all_gather || verb == Verb::scatter || verb == Verb::reduce_scatter || verb == Verb::all_to_all;
    if (needs_out && a.given[signature.count - 1] == Py_None) return {};
    CollectiveCalls* const calls = CollectiveCalls::of(fast);
    if (a.later) return calls != nullptr ? issue(*calls, signature, group, a) : nb::object();
    nb::object answer = calls != nullptr ? by_core(*calls, signature, a) : by_name(signature, fast, a);
    if (answer.is_none()) return {};
    return answer.ptr() == Py_True ? nb::none() : answer;  // there is no result
}

// Whether that fast path has the method; mostly it is of the same type as the one before.
bool has_method(nb::handle fast, const Signature& signature) {
    if (signature.known != Py_TYPE(fast.ptr())) {
        signature.known = Py_TYPE(fast.ptr());
        signature.knows = PyObject_HasAttr(fast.ptr(), signature.fast_name.ptr()) != 0;
    }
    return signature.knows;
}

// The same for two messages at once. What has begun, and is not through, is finished by the group.
nb::object exchange(const Signature& signature, nb::handle group, nb::handle fast, const Arguments& a) {
    if (a.given[2] == Py_None || a.given[3] == Py_None || !has_method(fast, signature)) return {};
    const std::int64_t began = monotonic_ns();
    try {
        const nb::object answer = by_name(signature, fast, a);
        if (answer.ptr() == Py_False) return {};
        if (answer.ptr() == Py_True) return nb::borrow(a.given[2]);
        const nb::handle tag = a.tag != nullptr ? nb::handle(a.tag) : nb::handle(names().zero);
        return group.attr("_go_on_exchanging")(nb::handle(a.given[0]), nb::handle(a.given[1]), nb::handle(a.given[2]),
                                               nb::handle(a.given[3]), tag, nb::handle(a.timeout), static_cast<double>(began) * 1e-9,
                                               *answer);
    } catch (const nb::python_error&) {
        group.attr(names().take_back)();
        throw;
    }
}

// The same for a message. One that takes long is handed over to the group.
nb::object message(const Signature& signature, nb::handle group, nb::handle fast, const Arguments& a) {
    const auto verb = static_cast<Message>(signature.verb);
    const nb::handle array = a.given[0];
    if (verb == Message::sendrecv) return exchange(signature, group, fast, a);
    try {
        const nb::object answer = by_name(signature, fast, a);
        if (answer.ptr() == Py_False) return {};
        const nb::object result = verb == Message::recv ? nb::borrow(array) : nb::none();
        if (answer.ptr() == Py_True) return result;
        const nb::handle tag = a.tag != nullptr ? nb::handle(a.tag) : nb::handle(names().zero);
        const nb::str& go_on = verb == Message::recv ? names().go_on_receiving : names().go_on_sending;
        return group.attr(go_on)(array, nb::handle(a.given[1]), tag, nb::handle(a.timeout), *answer);
    } catch (const nb::python_error&) {
        group.attr(names().take_back)();
        throw;
    }
}

// The Work of a message that the call does not wait for, where the fast path has sent it, or prepared it.
nb::object posted(const Signature& signature, nb::handle group, nb::handle fast, const Arguments& a) {
    if (!has_method(fast, signature)) return {};
    const nb::object answer = by_name(signature, fast, a);
    if (answer.is_none() || answer.ptr() == Py_False) return {};
    PyObject* const array = a.given[0];
    if (static_cast<Message>(signature.verb) == Message::irecv)
        return stand_in_line(nb::getattr(group, names().receive_work), group, answer, array);
    if (answer.ptr() == Py_True) return nb::getattr(group, names().sent)();
    if (!nb::isinstance<nb::tuple>(answer)) return stand_in_line(nb::getattr(group, names().send_work), group, answer, nb::none());
    const nb::handle tag = a.tag != nullptr ? nb::handle(a.tag) : nb::handle(names().zero);
    return group.attr("_go_on_sending_later")(nb::handle(array), nb::handle(a.given[1]), tag, nb::handle(a.timeout), *answer);
}

// Takes Phalanx's frames out of the error that is set.
void hide_frames(PyObject* hide) {
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != nullptr) PyException_SetTraceback(error, trace);
    Py_XDECREF(trace);
    PyObject* const done = PyObject_CallFunctionObjArgs(hide, error, nullptr);
    if (done == nullptr) {  // the handler of a signal has raised: that goes first, as everywhere
        Py_XDECREF(type);
        Py_XDECREF(error);
        return;
    }
    Py_DECREF(done);
    PyErr_Restore(type, error, PyException_GetTraceback(error));
}

// Not valid if the fast path has declined it.
nb::object do_fast(const Signature& signature, nb::handle group, nb::handle fast, const Arguments& a) {
    if (!signature.is_message) return collective(signature, group, fast, a);
    if (a.later) return {};
    return signature.is_posted ? posted(signature, group, fast, a) : message(signature, group, fast, a);
}

PyObject* call_method(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* kwnames) {
    const VerbMethod* const method = VerbMethod::of(self);
    const Signature& signature = *method->own;
    const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    Arguments found;
    const auto call = [&]() -> PyObject* {
        if (count > 0 && read(signature, args + 1, count - 1, kwnames, found)) {
            // Not PyObject_GetAttr: a group has a hook for attributes that it has not.
            const nb::object fast = nb::steal(PyObject_GenericGetAttr(args[0], signature.attribute.ptr()));
            if (!fast.is_valid()) PyErr_Clear();
            if (fast.is_valid() && !fast.is_none()) {
                nb::object result = do_fast(signature, args[0], fast, found);
                if (result.is_valid()) return result.release().ptr();
            }
        }
        return PyObject_Vectorcall(method->function, args, nargsf, kwnames);
    };
    return raising(call, [&] { hide_frames(method->on_error); });
}

Signature::Signature(nb::handle function) {
    const auto text = nb::cast<std::string>(nb::object(function.attr("__name__")));
    name = fast_name = interned(text.c_str());
    const auto* const message = std::find(message_names, message_names + messages, text);
    is_message = message != message_names + messages;
    attribute = interned(is_message ? "_fast_messages" : "_fast_path");
    if (is_message) {
        verb = static_cast<int>(message - message_names);
        is_posted = verb >= static_cast<int>(Message::isend);
        fast_name = interned(fast_names[verb]);
    } else {
        while (verb < verbs && text != verb_names[verb]) ++verb;
        if (verb == verbs) throw nb::value_error("not a verb that has a fast path");
    }
    const nb::object code = function.attr("__code__"), given = function.attr("__defaults__"), variables = code.attr("co_varnames");
    count = nb::cast<int>(nb::object(code.attr("co_argcount"))) - 1;  // without the group
    if (count > most) throw nb::value_error("a verb with too many arguments");
    required = count - (given.is_none() ? 0 : static_cast<int>(nb::len(given)));
    for (int i = 0; i < count; ++i) {
        names[i] = interned(nb::cast<std::string>(nb::object(variables[i + 1])).c_str());
        if (i >= required) defaults[i] = given[i - required];
    }
}

}  // namespace

void phalanx::bind_verb_methods(nb::module_& m) {
    m.attr("VerbMethod") = VerbMethod::type<call_method>("phalanx._core.VerbMethod");
    nb::list known;
    for (const char* verb : verb_names) known.append(verb);
    for (const char* verb : message_names) known.append(verb);
    m.attr("VERBS") = nb::tuple(known);
}
