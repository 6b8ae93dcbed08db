// Methods that are no Python functions, and look like the function whose place they take in a class: its name, signature and
// documentation are theirs. They call it only for what they do not do themselves. A frame of Python costs as much as everything
// else in a short collective.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <new>

#ifndef Py_TPFLAGS_METHOD_DESCRIPTOR
#define Py_TPFLAGS_METHOD_DESCRIPTOR (1UL << 17)
#endif

namespace phalanx {

namespace nb = nanobind;

// What `call()` returns: a new reference, or null for an error that Python knows already. What it throws is raised in Python, and
// `thrown()` is called then.
template <class Call, class Thrown>
PyObject* raising(Call call, Thrown thrown) {
    try {
        return call();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    thrown();
    return nullptr;
}

// `Own` is what the kind of method knows beside the function. `Own(function)` raises for one that it is not for.
template <class Own>
struct MethodLike {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* function;
    PyObject* on_error;  // a function of Python
    Own* own;
    PyObject* weak_references;

    static MethodLike* of(PyObject* self) noexcept { return reinterpret_cast<MethodLike*>(self); }

    // Makes the type. It is called with the function, and with the one for errors. `name` lives for ever.
    template <vectorcallfunc call_method>
    static nb::object type(const char* name) {
        static PyGetSetDef attributes[] = {
            {"__wrapped__", wrapped, nullptr, nullptr, nullptr},
            {"__name__", ask_function, nullptr, nullptr, named("__name__")},
            {"__qualname__", ask_function, nullptr, nullptr, named("__qualname__")},
            {"__module__", ask_function, nullptr, nullptr, named("__module__")},
            {"__doc__", ask_function, nullptr, nullptr, named("__doc__")},
            {"__annotations__", ask_function, nullptr, nullptr, named("__annotations__")},
            // Others ask isinstance(method, FunctionType), and take what is none for a plain attribute of the class:
            // torch.compile then calls it without the object, and mocks do not know its signature.
            {"__class__", ask_function, nullptr, nullptr, named("__class__")},
            {"__code__", ask_function, nullptr, nullptr, named("__code__")},
            {"__defaults__", ask_function, nullptr, nullptr, named("__defaults__")},
            {"__kwdefaults__", ask_function, nullptr, nullptr, named("__kwdefaults__")},
            {"__globals__", ask_function, nullptr, nullptr, named("__globals__")},
            {"__closure__", ask_function, nullptr, nullptr, named("__closure__")},
            {"_torchdynamo_disable", ask_function, tell_function, nullptr, named("_torchdynamo_disable")},
            {nullptr, nullptr, nullptr, nullptr, nullptr},
        };
        static PyMemberDef members[] = {
            {"__vectorcalloffset__", T_PYSSIZET, offsetof(MethodLike, call), READONLY, nullptr},
            {"__weaklistoffset__", T_PYSSIZET, offsetof(MethodLike, weak_references), READONLY, nullptr},
            {nullptr, 0, 0, 0, nullptr},
        };
        PyType_Slot slots[] = {
            {Py_tp_new, reinterpret_cast<void*>(make<call_method>)},
            {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
            {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
            {Py_tp_clear, reinterpret_cast<void*>(clear)},
            {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
            {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
            {Py_tp_repr, reinterpret_cast<void*>(represent)},
            {Py_tp_getset, attributes},
            {Py_tp_members, members},
            {0, nullptr},
        };
        PyType_Spec spec{name, sizeof(MethodLike), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
        nb::object made = nb::steal(PyType_FromSpec(&spec));
        if (!made.is_valid()) throw nb::python_error();
        return made;
    }

private:
    static void* named(const char* name) noexcept { return static_cast<void*>(const_cast<char*>(name)); }

    template <vectorcallfunc call_method>
    static PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
        PyObject *function = nullptr, *on_error = nullptr;
        if (!PyArg_ParseTuple(args, "OO", &function, &on_error)) return nullptr;
        try {
            auto* const allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
            PyObject* const self = allocate(type, 0);
            if (self == nullptr) return nullptr;
            const nb::object owner = nb::steal(self);
            MethodLike* const method = of(self);
            method->call = call_method;
            method->function = Py_NewRef(function);
            method->on_error = Py_NewRef(on_error);
            method->own = std::make_unique<Own>(nb::handle(function)).release();
            return Py_NewRef(self);
        } catch (nb::python_error& error) {
            error.restore();
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_ValueError, error.what());
        }
        return nullptr;
    }

    static int clear(PyObject* self) {
        Py_CLEAR(of(self)->function);
        Py_CLEAR(of(self)->on_error);
        return 0;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        Py_VISIT(of(self)->function);
        Py_VISIT(of(self)->on_error);
        return 0;
    }

    static void forget(PyObject* self) {
        PyObject_GC_UnTrack(self);
        if (of(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
        clear(self);
        delete of(self)->own;
        PyTypeObject* const type = Py_TYPE(self);
        auto* const release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
        release(self);
        Py_DECREF(type);
    }

    // As for a function: bound to an object, it is a method.
    static PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
        if (object == nullptr || object == Py_None) return Py_NewRef(self);
        static PyObject* const method_type = PyObject_GetAttrString(nb::module_::import_("types").ptr(), "MethodType");
        PyObject* const both[] = {self, object};
        return PyObject_Vectorcall(method_type, both, 2, nullptr);
    }

    static PyObject* represent(PyObject* self) { return PyObject_Repr(of(self)->function); }

    // What is known of the function, `closure` being the attribute's name.
    static PyObject* ask_function(PyObject* self, void* closure) {
        return PyObject_GetAttrString(of(self)->function, static_cast<const char*>(closure));
    }

    // How torch.compile is told not to look inside; see phalanx/untraced.py.
    static int tell_function(PyObject* self, PyObject* value, void* closure) {
        return PyObject_SetAttrString(of(self)->function, static_cast<const char*>(closure), value);
    }

    static PyObject* wrapped(PyObject* self, void*) { return Py_NewRef(of(self)->function); }
};

}  // namespace phalanx
