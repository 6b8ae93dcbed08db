// Where in the user's program a call was made: the innermost frame that is neither Phalanx's nor an installed library's
// (phalanx.group.tracking.call_site says which files are). Finding it costs a fraction of a microsecond; names and lines
// are made of it when an error has to tell them. Used with the GIL held only.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "frames.hpp"

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
    static CallSite current() { return lent() != nullptr ? *lent() : here(); }

    // An operation may run in another thread than the one that asked for it. Whoever lends a place keeps it until it is
    // taken back.
    static const CallSite*& lent() {
        static thread_local const CallSite* site = nullptr;
        return site;
    }

    // Lends a place to this thread until the end of the scope.
    class Lent {
    public:
        explicit Lent(const CallSite& site) : before_(std::exchange(lent(), &site)) {}
        ~Lent() { lent() = before_; }
        Lent(const Lent&) = delete;
        Lent& operator=(const Lent&) = delete;

    private:
        const CallSite* const before_;
    };

    // Files whose names begin so are not the user's. Those of installed libraries are the place where there is no other.
    static void add_library(std::string path, bool installed) {
        libraries().push_back({std::move(path), installed});
        for (Known& known : cache()) {
            Py_XDECREF(known.key);
            known = Known{};
        }
    }

    nb::object code() const { return code_ != nullptr ? nb::borrow<nb::object>(code_) : nb::none(); }

    // What tells one place from another, while the site is kept.
    std::pair<const void*, int> key() const noexcept { return {code_, place_}; }

    int line() const { return code_ != nullptr ? frames::line(code_, place_) : 0; }

private:
    enum class Kind : char { never, installed, users };

    struct Library {
        std::string path;
        bool installed;
    };

    // What is known of a file, so that its kind need not be found out by each call.
    struct Known {
        PyObject* key = nullptr;  // owned, so that no other object comes to lie there
        Kind kind = Kind::users;
    };

    static std::vector<Library>& libraries() {
        static std::vector<Library> all;
        return all;
    }

    static std::array<Known, 256>& cache() {
        static std::array<Known, 256> known;
        return known;
    }

    static CallSite here() {
        CallSite site;
        nb::object frame = frames::current();
        while (frame.is_valid()) {
            const nb::object code = frames::code(frame);
            const Kind kind = kind_of(code.ptr());
            if (kind == Kind::users || (kind == Kind::installed && site.code_ == nullptr)) site.set(frame, code);
            if (kind == Kind::users) break;
            frame = frames::back(frame);
        }
        return site;
    }

    void set(nb::handle frame, nb::handle code) {
        Py_INCREF(code.ptr());
        Py_XDECREF(code_);
        code_ = code.ptr();
        place_ = frames::place(frame);
    }

    static Kind kind_of(PyObject* code) {
        PyObject* key = frames::file_of(code);
        Known& known = cache()[(reinterpret_cast<std::uintptr_t>(key) >> 4) % cache().size()];
        if (known.key == key) return known.kind;
        Py_INCREF(key);
        PyObject* former = std::exchange(known.key, key);
        known.kind = look_up(code);
        const Kind kind = known.kind;
        Py_XDECREF(former);
        return kind;
    }

    static Kind look_up(PyObject* code) {
        const nb::object file = nb::steal(PyObject_GetAttrString(code, "co_filename"));
        Py_ssize_t size = 0;
        const char* name = file.is_valid() ? PyUnicode_AsUTF8AndSize(file.ptr(), &size) : nullptr;
        if (name == nullptr) {
            PyErr_Clear();
            return Kind::users;
        }
        Kind found = Kind::users;
        for (const auto& [path, installed] : libraries()) {
            if (static_cast<std::size_t>(size) < path.size() || std::memcmp(name, path.data(), path.size()) != 0) continue;
            if (!installed) return Kind::never;
            found = Kind::installed;
        }
        return found;
    }

    PyObject* code_ = nullptr;  // owned
    int place_ = 0;             // in the code, as frames::place gives it
};

}  // namespace phalanx
