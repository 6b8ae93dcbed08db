// Where in the user's program a call was made: the innermost frame that is not in a library's file. Finding it costs a
// fraction of a microsecond; names and lines are made of it when an error has to tell them. Used with the GIL held only.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

class CallSite {
public:
    CallSite() = default;  // an unknown place
    CallSite(const CallSite& other) : code_(other.code_), place_(other.place_) { Py_XINCREF(code_); }
    CallSite(CallSite&& other) noexcept : code_(std::exchange(other.code_, nullptr)), place_(other.place_) {}
    CallSite& operator=(CallSite other) noexcept {
        std::swap(code_, other.code_);
        place_ = other.place_;
        return *this;
    }
    ~CallSite() { Py_XDECREF(code_); }

    // What this thread works for: the place that was lent to it, else where it is itself.
    static CallSite current(bool skip_first) { return lent() != nullptr ? *lent() : here(skip_first); }

    // An operation may run in another thread than the one that asked for it. Whoever lends a place keeps it until it is
    // taken back.
    static const CallSite*& lent() {
        static thread_local const CallSite* site = nullptr;
        return site;
    }

    // Files whose names begin so are not the user's.
    static std::vector<std::string>& libraries() {
        static std::vector<std::string> paths;
        return paths;
    }

    nb::object code() const { return code_ != nullptr ? nb::borrow<nb::object>(code_) : nb::none(); }

    int line() const {
#if PY_VERSION_HEX >= 0x030b0000
        if (code_ == nullptr) return 0;
        return PyCode_Addr2Line(reinterpret_cast<PyCodeObject*>(code_), place_);
#else
        return place_;
#endif
    }

private:
    static CallSite here(bool skip_first) {
        CallSite site;
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame != nullptr) {
            PyCodeObject* code = PyFrame_GetCode(frame);
            if (!skip_first && !is_library(code)) {
                site.code_ = reinterpret_cast<PyObject*>(code);
#if PY_VERSION_HEX >= 0x030b0000
                site.place_ = PyFrame_GetLasti(frame);
#else
                site.place_ = PyFrame_GetLineNumber(frame);
#endif
                Py_DECREF(frame);
                return site;
            }
            skip_first = false;
            Py_DECREF(code);
            PyFrameObject* back = PyFrame_GetBack(frame);
            Py_DECREF(frame);
            frame = back;
        }
        return site;
    }

    static bool is_library(PyCodeObject* code) {
        Py_ssize_t size = 0;
        const char* name = PyUnicode_AsUTF8AndSize(code->co_filename, &size);
        if (name == nullptr) {
            PyErr_Clear();
            return false;
        }
        for (const std::string& path : libraries()) {
            if (static_cast<std::size_t>(size) >= path.size() && std::memcmp(name, path.data(), path.size()) == 0) {
                return true;
            }
        }
        return false;
    }

    PyObject* code_ = nullptr;  // owned
    int place_ = 0;             // in the code: an instruction's offset, in Python 3.10 a line
};

}  // namespace phalanx
