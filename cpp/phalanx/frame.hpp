// The frame of an array as src/phalanx/wire/frames.py and src/phalanx/group/data/arrays.py write it: a header of 24 bytes,
// then the description (MessagePack of [dtype, shape, "numpy" or "torch"]), then the bytes of the array.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace phalanx {

static_assert(std::endian::native == std::endian::little, "frames are little endian");

struct FrameHeader {
    char magic[2] = {'P', 'X'};
    std::uint8_t kind = 0;
    std::uint8_t zero = 0;
    std::uint32_t description = 0;
    std::uint64_t tag = 0;
    std::uint64_t payload = 0;
};
static_assert(sizeof(FrameHeader) == 24);

constexpr std::uint8_t kind_array = 2, kind_object = 3;

// The header and the description of one array.
class ArrayHead {
public:
    static constexpr int most_dims = 15;  // of one byte of MessagePack; more take the general way
    static constexpr std::size_t most_text = 31, most_library = 15;
    static constexpr std::size_t longest = 2 + most_text + 1 + 9 * most_dims + 1 + most_library;  // description

    // False if this array is not as simple. Takes what a Py_buffer says, and the library that the array is of.
    bool make(std::string_view dtype, int dims, const std::ptrdiff_t* shape, std::uint64_t tag, std::uint64_t payload,
              std::string_view library = "numpy") {
        if (dtype.empty() || dtype.size() > most_text || dims > most_dims || library.size() > most_library) return false;
        size_ = sizeof(FrameHeader);
        put(0x93);
        text(dtype);
        put(static_cast<std::uint8_t>(0x90 | dims));
        for (int i = 0; i < dims; ++i) number(static_cast<std::uint64_t>(shape[i]));
        text(library);
        FrameHeader header;
        header.kind = kind_array;
        header.description = static_cast<std::uint32_t>(size_ - sizeof header);
        header.tag = tag;
        header.payload = payload;
        std::memcpy(bytes_.data(), &header, sizeof header);
        return true;
    }

    const std::uint8_t* data() const noexcept { return bytes_.data(); }
    std::size_t size() const noexcept { return size_; }

private:
    void put(std::uint8_t byte) noexcept { bytes_[size_++] = byte; }

    void text(std::string_view characters) noexcept {
        put(static_cast<std::uint8_t>(0xa0 | characters.size()));
        std::memcpy(bytes_.data() + size_, characters.data(), characters.size());
        size_ += characters.size();
    }

    void number(std::uint64_t value) noexcept {
        if (value < 0x80) return put(static_cast<std::uint8_t>(value));
        const int bytes = value <= 0xff ? 1 : value <= 0xffff ? 2 : value <= 0xffffffff ? 4 : 8;
        put(static_cast<std::uint8_t>(0xcc + std::countr_zero(static_cast<unsigned>(bytes))));
        for (int i = bytes - 1; i >= 0; --i) put(static_cast<std::uint8_t>(value >> (8 * i)));  // big endian
    }

    std::array<std::uint8_t, sizeof(FrameHeader) + longest> bytes_;
    std::size_t size_ = 0;
};

}  // namespace phalanx
