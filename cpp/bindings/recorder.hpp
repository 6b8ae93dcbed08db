// What the quick paths did last, and where in the user's program they were called. The Python journal reads it when an
// error has to tell what this rank was doing; writing it costs a fraction of a microsecond.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "phalanx/waiting.hpp"

namespace phalanx {

namespace nb = nanobind;

struct Record {
    PyObject* code = nullptr;  // owned
    int place = 0;             // in the code: an instruction's offset, in Python 3.10 a line
    const char* verb = nullptr;
    int rank = -1;         // the root, the destination or the source; -1 where there is none
    const char* op = "";   // the reduction
    std::int64_t tag = 0;
    int dtype = -1;           // as Dtype in reduce.hpp; -1 where there is none
    std::uint64_t count = 0;  // elements
    std::uint64_t sequence = 0;  // of a collective; 0 for a message
    std::uint64_t mark = 0;
    std::int64_t began_ns = 0;
    std::int64_t ended_ns = 0;  // 0 while it runs
};

// A ring of the last records. Used with the GIL held only.
class Recorder {
public:
    static constexpr std::size_t kept = 256;

    // Frames of files in `folder` are not the user's.
    explicit Recorder(std::string folder) : folder_(std::move(folder)) {}
    ~Recorder() {
        for (Record& record : records_) Py_XDECREF(record.code);
    }
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    std::uint64_t sequence = 0;  // collectives issued so far, by whatever path

    // The caller fills in the rest, and sets `ended_ns` through `end`.
    Record& begin(const char* verb) {
        Record& record = records_[count_++ % kept];
        Py_CLEAR(record.code);
        record = Record{};
        record.verb = verb;
        find_caller(record);
        record.began_ns = monotonic_ns();
        return record;
    }

    // Oldest first: (verb, rank, op, tag, dtype, count, sequence, mark, code, line, began, ended) with times in seconds,
    // ended 0 while it runs.
    nb::list records() const {
        nb::list found;
        const std::size_t first = count_ > kept ? count_ - kept : 0;
        for (std::size_t i = first; i < count_; ++i) {
            const Record& r = records_[i % kept];
            nb::object code = r.code != nullptr ? nb::borrow<nb::object>(r.code) : nb::none();
            found.append(nb::make_tuple(r.verb, r.rank, r.op, r.tag, r.dtype, r.count, r.sequence, r.mark, code,
                                        line_of(r),                                        static_cast<double>(r.began_ns) * 1e-9, static_cast<double>(r.ended_ns) * 1e-9));
        }
        return found;
    }

private:
    void find_caller(Record& record) const {
        // The first frame is the Group's own method, which called us.
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        bool first = true;
        while (frame != nullptr) {
            PyCodeObject* code = PyFrame_GetCode(frame);
            if (!first && !is_ours(code)) {
                record.code = reinterpret_cast<PyObject*>(code);
#if PY_VERSION_HEX >= 0x030b0000
                record.place = PyFrame_GetLasti(frame);
#else
                record.place = PyFrame_GetLineNumber(frame);
#endif
                Py_DECREF(frame);
                return;
            }
            first = false;
            Py_DECREF(code);
            PyFrameObject* back = PyFrame_GetBack(frame);
            Py_DECREF(frame);
            frame = back;
        }
    }

    bool is_ours(PyCodeObject* code) const {
        Py_ssize_t size = 0;
        const char* name = PyUnicode_AsUTF8AndSize(code->co_filename, &size);
        if (name == nullptr) {
            PyErr_Clear();
            return false;
        }
        return static_cast<std::size_t>(size) > folder_.size() && std::memcmp(name, folder_.data(), folder_.size()) == 0;
    }

    static int line_of(const Record& record) {
#if PY_VERSION_HEX >= 0x030b0000
        if (record.code == nullptr) return 0;
        return PyCode_Addr2Line(reinterpret_cast<PyCodeObject*>(record.code), record.place);
#else
        return record.place;
#endif
    }

    std::string folder_;
    std::array<Record, kept> records_{};
    std::size_t count_ = 0;
};

// For `Bound::interrupted`: runs the program's signal handlers; true if one of them raised.
inline bool signal_raised() {
    nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

}  // namespace phalanx
