// The slate of this process, as the fast paths and the Python journal write to it. Used with the GIL held only.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "call_site.hpp"
#include "phalanx/mapping.hpp"
#include "phalanx/run_delay.hpp"
#include "phalanx/slate.hpp"

namespace phalanx {

namespace nb = nanobind;

class SlateWriter {
public:
    // An operation on the slate.
    struct Place {
        std::uint64_t number = 0;  // 0: it is not there
        std::uint64_t bytes = 0;
        std::int64_t began_ns = 0;
        std::uint32_t site = 0;
    };

    // The mapping makes private pages of it in a forked child, which are empty: no descriptor is kept for their contents.
    explicit SlateWriter(int fd) : mapping_(fd, slate::bytes), writer_(mapping_.at()) { mapping_.forget(); }

    Place begin(std::uint32_t group, const char* verb, const CallSite& site, std::int32_t peer, std::uint64_t bytes,
                std::uint64_t sequence, std::uint64_t fingerprint, std::int64_t now) {
        const std::uint32_t number = site_of(verb, site);
        return {writer_.begin(group, number, peer, bytes, sequence, fingerprint, delay_.begin(now), now), bytes, now, number};
    }

    void end(const Place& place, std::int64_t now, bool failed = false) noexcept {
        if (place.number == 0) return;
        writer_.end(place.number, place.site, place.bytes, place.began_ns, now, failed);
        delay_.end(place.began_ns, now);
    }

    // The slate as an array, which keeps this object.
    static nb::object memory(nb::handle self) {
        auto* writer = nb::inst_ptr<SlateWriter>(self);
        return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(writer->mapping_.at(), {slate::bytes}, self));
    }

private:
    using Key = std::tuple<const void*, int, const char*>;

    struct Known {
        Key key{nullptr, 0, nullptr};
        std::uint32_t number = 0;
    };

    // The texts of verbs are constants, or interned: they stay where they are.
    std::uint32_t site_of(const char* verb, const CallSite& site) {
        const auto [code, place] = site.key();
        const Key key{code, place, verb};
        Known& known = recent_[(reinterpret_cast<std::uintptr_t>(code) / 64 + static_cast<std::uintptr_t>(place) +
                                reinterpret_cast<std::uintptr_t>(verb) / 8) % recent_.size()];
        if (known.key == key && known.number != 0) return known.number;
        auto found = sites_.find(key);
        if (found == sites_.end()) {
            if (sites_.size() >= slate::sites) return 0;  // a program that makes new code all the time
            found = sites_.emplace(key, std::pair(writer_.add_site(text_of(verb, site)), site)).first;
        }
        known = {key, found->second.first};
        return known.number;
    }

    static std::string text_of(const char* verb, const CallSite& site) {
        const nb::object code = site.code();
        std::string text = verb;
        for (const char* name : {"co_filename", "co_name"}) {
            text += '\0';
            const nb::object value = code.is_none() ? nb::none() : nb::steal(PyObject_GetAttrString(code.ptr(), name));
            // The name of a file may hold bytes that are no UTF-8, as lone surrogates: they become question marks.
            const nb::object encoded = value.is_valid() && !value.is_none()
                                           ? nb::steal(PyUnicode_AsEncodedString(value.ptr(), "utf-8", "replace"))
                                           : nb::object();
            char* words = nullptr;
            Py_ssize_t size = 0;
            if (encoded.is_valid() && PyBytes_AsStringAndSize(encoded.ptr(), &words, &size) == 0)
                text.append(words, static_cast<std::size_t>(size));
            else
                PyErr_Clear();
        }
        return text + '\0' + std::to_string(site.line());
    }

    Mapping mapping_;
    slate::Writer writer_;
    RunDelay delay_;
    std::array<Known, 64> recent_{};
    std::map<Key, std::pair<std::uint32_t, CallSite>> sites_;  // the place is kept, so that no other code comes to lie there
};

}  // namespace phalanx
