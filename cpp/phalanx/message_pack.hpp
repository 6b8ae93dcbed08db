// Writes MessagePack, always in the shortest form, as msgspec does.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace phalanx {

class MessagePackWriter {
public:
    const char* data() const noexcept { return bytes_.data(); }
    std::size_t size() const noexcept { return bytes_.size(); }

    // Empty again. Keeps its memory, unless that is much.
    void clear() noexcept {
        if (bytes_.capacity() > most_kept) bytes_ = {};
        bytes_.clear();
    }

    void nothing() { put(0xc0); }
    void boolean(bool value) { put(value ? 0xc3 : 0xc2); }
    void number(double value) { big_endian(0xcb, std::bit_cast<std::uint64_t>(value), 8); }

    void unsigned_number(std::uint64_t value) {
        if (value < 0x80)
            put(static_cast<std::uint8_t>(value));
        else if (value <= 0xff)
            big_endian(0xcc, value, 1);
        else if (value <= 0xffff)
            big_endian(0xcd, value, 2);
        else if (value <= 0xffff'ffff)
            big_endian(0xce, value, 4);
        else
            big_endian(0xcf, value, 8);
    }

    void signed_number(std::int64_t value) {
        if (value >= 0)
            unsigned_number(static_cast<std::uint64_t>(value));
        else if (value >= -0x20)
            put(static_cast<std::uint8_t>(value));
        else if (value >= INT8_MIN)
            big_endian(0xd0, static_cast<std::uint64_t>(value), 1);
        else if (value >= INT16_MIN)
            big_endian(0xd1, static_cast<std::uint64_t>(value), 2);
        else if (value >= INT32_MIN)
            big_endian(0xd2, static_cast<std::uint64_t>(value), 4);
        else
            big_endian(0xd3, static_cast<std::uint64_t>(value), 8);
    }

    // These three are for lengths below 2^32.
    void text(const char* characters, std::size_t size) {
        if (size < 32)
            put(static_cast<std::uint8_t>(0xa0 | size));
        else
            length(size, 0xd9, 0xda, 0xdb);
        append(characters, size);
    }

    void raw(const char* bytes, std::size_t size) {
        length(size, 0xc4, 0xc5, 0xc6);
        append(bytes, size);
    }

    // What comes before so many bytes of a type of one's own; then `append` them.
    void extension(std::uint8_t type, std::size_t size) {
        if (std::has_single_bit(size) && size <= 16)
            put(static_cast<std::uint8_t>(0xd4 + std::countr_zero(size)));
        else
            length(size, 0xc7, 0xc8, 0xc9);
        put(type);
    }
    void put(std::uint8_t byte) { bytes_.push_back(static_cast<char>(byte)); }
    void append(const char* from, std::size_t size) { bytes_.insert(bytes_.end(), from, from + size); }

    void list(std::size_t size) { container(size, 0x90, 0xdc); }
    void map(std::size_t size) { container(size, 0x80, 0xde); }

private:
    static constexpr std::size_t most_kept = 64 << 10;

    void big_endian(std::uint8_t code, std::uint64_t value, int bytes) {
        char out[9] = {static_cast<char>(code)};
        for (int i = 0; i < bytes; ++i) out[bytes - i] = static_cast<char>(value >> (8 * i));
        append(out, static_cast<std::size_t>(bytes) + 1);
    }

    void length(std::size_t size, std::uint8_t of_one, std::uint8_t of_two, std::uint8_t of_four) {
        if (size <= 0xff)
            big_endian(of_one, size, 1);
        else if (size <= 0xffff)
            big_endian(of_two, size, 2);
        else
            big_endian(of_four, size, 4);
    }

    void container(std::size_t size, std::uint8_t of_few, std::uint8_t of_two) {
        if (size < 16)
            put(static_cast<std::uint8_t>(of_few | size));
        else if (size <= 0xffff)
            big_endian(of_two, size, 2);
        else
            big_endian(static_cast<std::uint8_t>(of_two + 1), size, 4);
    }

    std::vector<char> bytes_;
};

}  // namespace phalanx
