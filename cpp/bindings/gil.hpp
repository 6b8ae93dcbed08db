// How the bindings let go of the GIL and take it back, also while the program ends.
//
// When the interpreter is being finalized, a daemon thread that asks for the GIL never gets it. CPython before 3.14 ends
// such a thread with pthread_exit, which unwinds its stack: destructors that need the GIL run without it, and nanobind's
// functions swallow what must not be swallowed, so the process crashes. CPython 3.14 lets the thread hang instead. Here
// it hangs with every version: it stays where it is, with all that it holds, and ends with the process.
//
// So nothing else in this folder takes the GIL, and what may run Python code goes through `in_interpreter`.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <exception>

#include "phalanx/jitter.hpp"

namespace phalanx {

[[noreturn]] inline void hang() noexcept {
    for (;;) ::pause();
}

// Calls what may run Python code, and so may give the GIL away. If the interpreter ends this thread meanwhile, what unwinds
// the stack is no exception of C++: only `...` matches it.
template <class F>
auto in_interpreter(F call) {
    try {
        return call();
    } catch (const std::exception&) {
        throw;
    } catch (...) {
        hang();
    }
}

inline void take_gil(PyThreadState* state) noexcept {
    jitter::step();
    if (Py_IsInitialized() == 0) hang();  // false as soon as the interpreter begins to be finalized
    in_interpreter([&] { PyEval_RestoreThread(state); });
}

// Lets go of the GIL until the end of the scope.
class WithoutGil {
public:
    WithoutGil() noexcept : state_(PyEval_SaveThread()) { jitter::step(); }
    ~WithoutGil() { take_gil(state_); }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};

// Has the GIL until the end of the scope, in a thread that has let go of it further out.
class WithGil {
public:
    WithGil() noexcept {
        jitter::step();
        if (Py_IsInitialized() == 0) hang();
        state_ = in_interpreter([] { return PyGILState_Ensure(); });
    }
    ~WithGil() { PyGILState_Release(state_); }
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;

private:
    PyGILState_STATE state_;
};

}  // namespace phalanx
