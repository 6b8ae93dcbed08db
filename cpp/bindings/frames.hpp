// Python's frames, as far as CallSite looks at them. Builds differ here, and nowhere else in this folder: Python 3.10 has no
// function for a frame's instruction, and the stable ABI (wheels for Python 3.12 and newer) promises neither that one nor
// two others. CPython has all three, so there they are looked up by name; without them, call sites are unknown.
#pragma once

#include <nanobind/nanobind.h>

#if defined(Py_LIMITED_API)
#include <dlfcn.h>
#endif

namespace phalanx::frames {

namespace nb = nanobind;

// The frame that this thread runs; not valid if there is none.
inline nb::object current() { return nb::steal(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get()))); }

inline nb::object code(nb::handle frame) {
    return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

#if defined(Py_LIMITED_API)

template <class Function>
Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// The caller's frame; not valid if there is none.
inline nb::object back(nb::handle frame) {
    static auto* const call = find<PyFrameObject*(PyFrameObject*)>("PyFrame_GetBack");
    if (call == nullptr) return {};
    return nb::steal(reinterpret_cast<PyObject*>(call(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

// Where in its code a frame is; -1 if that is unknown.
inline int place(nb::handle frame) {
    static auto* const call = find<int(PyFrameObject*)>("PyFrame_GetLasti");
    return call != nullptr ? call(reinterpret_cast<PyFrameObject*>(frame.ptr())) : -1;
}

// The line of a place; 0 if it is unknown.
inline int line(nb::handle code, int place) {
    static auto* const call = find<int(PyCodeObject*, int)>("PyCode_Addr2Line");
    return call != nullptr ? call(reinterpret_cast<PyCodeObject*>(code.ptr()), place) : 0;
}

// An object that stands for the file of a code, for as long as it lives.
inline PyObject* file_of(PyObject* code) { return code; }

#else

inline nb::object back(nb::handle frame) {
    return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

// The name, which is one object for all functions of a module.
inline PyObject* file_of(PyObject* code) { return reinterpret_cast<PyCodeObject*>(code)->co_filename; }

#if PY_VERSION_HEX >= 0x030b0000
inline int place(nb::handle frame) { return PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr())); }
inline int line(nb::handle code, int place) { return PyCode_Addr2Line(reinterpret_cast<PyCodeObject*>(code.ptr()), place); }
#else
inline int place(nb::handle frame) { return PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frame.ptr())); }
inline int line(nb::handle, int place) { return place; }
#endif

#endif

}  // namespace phalanx::frames
