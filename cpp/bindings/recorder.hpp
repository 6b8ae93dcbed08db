// What the fast paths did last, and where in the user's program they were called. The Python journal reads it when an
// error has to tell what this rank was doing; writing it costs a fraction of a microsecond.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <utility>

#include "call_site.hpp"
#include "gil.hpp"
#include "phalanx/waiting.hpp"
#include "slate_writer.hpp"

namespace phalanx {

namespace nb = nanobind;

struct Record {
    CallSite site;
    const char* verb = nullptr;
    int rank = -1;         // the root, the destination or the source; -1 where there is none
    const char* op = "";   // the reduction
    std::int64_t tag = 0;
    int dtype = -1;           // as Dtype in reduce.hpp; -1 where there is none
    static constexpr int most_dims = 8;
    int dims = 0;
    std::array<std::int64_t, most_dims> shape;  // as many as there are dims
    std::uint64_t sequence = 0;  // of a collective; 0 for a message
    std::uint64_t fingerprint = 0;
    std::uint64_t bytes = 0;
    std::int64_t began_ns = 0;
    std::int64_t ended_ns = 0;  // 0 while it runs
    SlateWriter::Place place{};  // on the slate
};

// A ring of the last records. Used with the GIL held only.
class Recorder {
public:
    static constexpr std::size_t kept = 256;

    // `slate`: null where this process has none. `group`: its number there.
    explicit Recorder(SlateWriter* slate = nullptr, std::uint32_t group = 0) : slate_(slate), group_(group) {}
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    std::uint64_t sequence = 0;  // collectives issued so far, by whatever path

    // The caller fills in the rest, then calls `show`, and `end` when it is over.
    Record& begin(const char* verb) {
        return begin(verb, CallSite::current());
    }

    Record& begin(const char* verb, CallSite site) {
        Record& record = records_[count_++ % kept];
        record.verb = verb;
        record.site = std::move(site);
        record.rank = -1;
        record.op = "";
        record.tag = 0;
        record.dtype = -1;
        record.dims = 0;  // so that the shape need not be cleared
        record.sequence = record.fingerprint = record.bytes = 0;
        record.began_ns = monotonic_ns();
        record.ended_ns = 0;
        return record;
    }

    // From here on other processes see it.
    void show(Record& record) {
        if (slate_ == nullptr) return;
        record.place = slate_->begin(group_, record.verb, record.site, record.rank, record.bytes, record.sequence,
                                     record.fingerprint, record.began_ns);
    }

    void end(Record& record, std::int64_t now, bool failed = false) {
        record.ended_ns = now;
        if (slate_ != nullptr) slate_->end(record.place, now, failed);
    }

    // Of one that the ring has overtaken.
    void end(const SlateWriter::Place& place, std::int64_t now, bool failed = false) {
        if (slate_ != nullptr) slate_->end(place, now, failed);
    }

    // Oldest first: (verb, rank, op, tag, dtype, shape, sequence, fingerprint, site, began, ended) with times in seconds, ended
    // 0 while it runs.
    nb::list records() const {
        nb::list found;
        const std::size_t first = count_ > kept ? count_ - kept : 0;
        for (std::size_t i = first; i < count_; ++i) {
            const Record& r = records_[i % kept];
            nb::list lengths;
            for (int d = 0; d < r.dims; ++d) lengths.append(r.shape[static_cast<std::size_t>(d)]);
            const nb::tuple shape(lengths);
            found.append(nb::make_tuple(r.verb, r.rank, r.op, r.tag, r.dtype, shape, r.sequence, r.fingerprint, r.site,
                                        static_cast<double>(r.began_ns) * 1e-9, static_cast<double>(r.ended_ns) * 1e-9));
        }
        return found;
    }

private:
    SlateWriter* slate_;
    const std::uint32_t group_;
    std::array<Record, kept> records_{};
    std::size_t count_ = 0;
};

// For `Bound::interrupted`: runs the program's signal handlers; true if one of them raised.
inline bool signal_raised() {
    const WithGil gil;
    return PyErr_CheckSignals() != 0;
}

}  // namespace phalanx
