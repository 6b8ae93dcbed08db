// The options of a call of torch.distributed, read where pybind11 keeps them: to ask torch for the four of them by their
// names costs more than a short collective.
//
// An object of pybind11 has a pointer to its C++ object behind the header of every Python object; the fields lie where
// torch/csrc/distributed/c10d/Types.hpp puts them. Before they are used, they are compared with what torch says of some
// options; where that differs, no options are ever read here.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

struct CallOptions {
    bool later = false;              // the call must return before the operation is done
    std::int64_t timeout_ms = -1;    // below 0: not set
    int op = -1;                     // torch's number of the reduction
    std::int64_t root = -1;
};

// One of torch's classes of options.
class OptionsLayout {
public:
    OptionsLayout() = default;
    // `places` are the offsets of timeout, asyncOp, reduceOp and rootRank, -1 for a field that there is not. `samples` are
    // pairs of options and these four fields as torch says them.
    OptionsLayout(nb::handle type, std::array<int, 4> places, nb::list samples) : type_(nb::borrow(type)), places_(places) {
        usable_ = samples.size() > 0;
        for (nb::handle pair : samples) {
            CallOptions found;
            const nb::object options = pair[0];
            usable_ = usable_ && has_type(options);
            if (!usable_) return;
            fetch(options, found);
            const auto said = nb::cast<std::array<std::int64_t, 4>>(nb::object(pair[1]));
            usable_ = said == std::array<std::int64_t, 4>{found.timeout_ms, found.later ? 1 : 0, found.op, found.root};
        }
    }

    bool usable() const noexcept { return usable_; }

    // False if these are no such options.
    bool read(nb::handle options, CallOptions& found) const noexcept {
        if (!usable_ || !has_type(options)) return false;
        fetch(options, found);
        return true;
    }

private:
    bool has_type(nb::handle options) const noexcept {
        return reinterpret_cast<PyObject*>(Py_TYPE(options.ptr())) == type_.ptr();
    }

    void fetch(nb::handle options, CallOptions& found) const noexcept {
        const std::byte* fields = nullptr;
        std::memcpy(&fields, reinterpret_cast<const std::byte*>(options.ptr()) + sizeof(PyObject), sizeof fields);
        std::uint8_t flag = 0, op = 0;
        std::memcpy(&found.timeout_ms, fields + places_[0], sizeof found.timeout_ms);
        std::memcpy(&flag, fields + places_[1], 1);
        found.later = flag != 0;
        if (places_[2] >= 0) {
            std::memcpy(&op, fields + places_[2], 1);
            found.op = op;
        }
        if (places_[3] >= 0) std::memcpy(&found.root, fields + places_[3], sizeof found.root);
    }

    nb::object type_;
    std::array<int, 4> places_{};
    bool usable_ = false;
};

}  // namespace phalanx
