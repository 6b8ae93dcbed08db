// Locks of Python's `threading`, taken by the core.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

namespace nb = nanobind;

// One, as its two methods.
class PythonLock {
public:
    explicit PythonLock(nb::object lock) : acquire_(lock.attr("acquire")), release_(lock.attr("release")) {}

    bool try_acquire() const {
        PyObject* arguments[] = {nullptr, Py_False};
        const auto taken = nb::steal<nb::object>(
            PyObject_Vectorcall(acquire_.ptr(), arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
        if (!taken.is_valid()) throw nb::python_error();
        return taken.is(nb::handle(Py_True));
    }

    void release() const noexcept {
        PyObject* released = PyObject_CallNoArgs(release_.ptr());
        if (released == nullptr) PyErr_WriteUnraisable(release_.ptr());
        Py_XDECREF(released);
    }

private:
    nb::object acquire_;
    nb::object release_;
};

// Held for a scope, if it was free.
class HeldLock {
public:
    explicit HeldLock(const PythonLock& lock) : lock_(lock), taken_(lock.try_acquire()) {}
    ~HeldLock() {
        if (taken_) lock_.release();
    }
    HeldLock(const HeldLock&) = delete;
    HeldLock& operator=(const HeldLock&) = delete;
    bool taken() const noexcept { return taken_; }

private:
    const PythonLock& lock_;
    bool taken_;
};

}  // namespace phalanx
