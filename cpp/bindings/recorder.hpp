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
    bool failed = false;        // it ended by an error
    SlateWriter::Place place{};  // on the slate
};

// Two rings of the last records: messages of other threads must not push out the collective that runs meanwhile, whose
// error is made of its record. Used with the GIL held only.
class Recorder {
public:
    static constexpr std::size_t kept = 256;  // of each kind

    // `slate`: null where this process has none. `group`: its number there.
    explicit Recorder(SlateWriter* slate = nullptr, std::uint32_t group = 0) : slate_(slate), group_(group) {}
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    std::uint64_t sequence = 0;  // collectives issued so far, by whatever path

    // The caller fills in the rest, then calls `show`, and `end` when it is over.
    Record& begin_message(const char* verb) { return begin(messages_, verb, CallSite::current()); }
    Record& begin_collective(const char* verb, CallSite site) { return begin(collectives_, verb, std::move(site)); }

    // From here on other processes see it.
    void show(Record& record) {
        if (slate_ == nullptr) return;
        record.place = slate_->begin(group_, record.verb, record.site, record.rank, record.bytes, record.sequence,
                                     record.fingerprint, record.began_ns);
    }

    void end(Record& record, std::int64_t now, bool failed = false) {
        record.ended_ns = now;
        record.failed = failed;
        if (slate_ != nullptr) slate_->end(record.place, now, failed);
    }

    // Of one that the ring has overtaken.
    void end(const SlateWriter::Place& place, std::int64_t now, bool failed = false) {
        if (slate_ != nullptr) slate_->end(place, now, failed);
    }

    // Collectives, then messages, each with the oldest first: (verb, rank, op, tag, dtype, shape, sequence, fingerprint, site,
    // began, ended, failed) with times in seconds, ended 0 while it runs.
    nb::list records() const {
        nb::list found;
        add_to(found, collectives_);
        add_to(found, messages_);
        return found;
    }

private:
    struct Ring {
        std::array<Record, kept> records{};
        std::size_t count = 0;
    };

    static Record& begin(Ring& ring, const char* verb, CallSite site) {
        Record& record = ring.records[ring.count++ % kept];
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
        record.failed = false;
        return record;
    }

    static void add_to(nb::list& found, const Ring& ring) {
        const std::size_t first = ring.count > kept ? ring.count - kept : 0;
        for (std::size_t i = first; i < ring.count; ++i) {
            const Record& r = ring.records[i % kept];
            nb::list lengths;
            for (int d = 0; d < r.dims; ++d) lengths.append(r.shape[static_cast<std::size_t>(d)]);
            const nb::tuple shape(lengths);
            found.append(nb::make_tuple(r.verb, r.rank, r.op, r.tag, r.dtype, shape, r.sequence, r.fingerprint, r.site,
                                        static_cast<double>(r.began_ns) * 1e-9, static_cast<double>(r.ended_ns) * 1e-9, r.failed));
        }
    }

    SlateWriter* slate_;
    const std::uint32_t group_;
    Ring collectives_;
    Ring messages_;
};

// For `Bound::interrupted`: runs the program's signal handlers; true if one of them raised.
inline bool signal_raised() {
    const WithGil gil;
    return PyErr_CheckSignals() != 0;
}

}  // namespace phalanx
