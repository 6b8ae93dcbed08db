// The heads of the messages of one lane through MPI: how they are written, and what one that has come says.
// src/phalanx/backends/mpi/protocol.py says what is sent when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "mpi_wire.hpp"
#include "phalanx/frame.hpp"
#include "plain_array.hpp"

namespace phalanx {

// The kind of a head, its first byte; all of them are in protocol.py.
enum class HeadWord : std::uint8_t { message = 1, offer = 2, ready = 3, drop = 4, cut = 5 };

class MpiHeads {
public:
    using Head = std::span<const std::byte>;
    using Request = std::unique_ptr<MpiRequest>;

    // `begins`: what the head of every short message of this lane begins with.
    MpiHeads(const MpiWire& wire, std::string begins) : wire_(wire), begins_(std::move(begins)) {}

    // Of a head that says one word and nothing else.
    std::size_t shortest() const noexcept { return begins_.size(); }

    // -- writing -------------------------------------------------------------------------------------------------------

    Request word(HeadWord word, std::uint64_t number) const {
        auto head = std::make_unique<MpiRequest>(wire_, begins_.size());
        begin(*head, word, number);
        return head;
    }

    // With all of the message.
    Request message(const ArrayHead& head, const PlainArray& array) const {
        auto whole = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + array.bytes);
        std::byte* const to = begin(*whole, HeadWord::message, 0);
        put(put(to, head.data(), head.size()), array.data, array.bytes);
        return whole;
    }

    Request offer(const ArrayHead& head, const PlainArray& array, std::uint64_t number) const {
        auto offer = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + sizes_bytes);
        const std::uint16_t parts = 1;
        const std::uint64_t size = array.bytes;
        std::byte* to = begin(*offer, HeadWord::offer, number);
        to = put(to, head.data(), sizeof(FrameHeader));
        to = put(to, &parts, sizeof parts);
        to = put(to, &size, sizeof size);
        put(to, head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        return offer;
    }

    // -- reading -------------------------------------------------------------------------------------------------------

    // Whether a head of at least the shortest length is of this lane, and says this word.
    bool is_ours(Head head, HeadWord word) const {
        return head[0] == static_cast<std::byte>(word) && std::memcmp(head.data() + 1, begins_.data() + 1, number_at - 1) == 0;
    }

    static std::uint64_t number_of(Head head) { return read_at<std::uint64_t>(head, number_at); }

    // Whether a head is long enough to have a tag.
    bool has_tag(Head head) const { return head.size() >= begins_.size() + sizeof(FrameHeader); }
    std::int64_t tag_of(Head head) const {
        return static_cast<std::int64_t>(read_at<std::uint64_t>(head, begins_.size() + offsetof(FrameHeader, tag)));
    }

    // Whether it has all of a message that fits.
    bool is_whole(Head head, const ArrayHead& expected, std::size_t bytes) const {
        return head.size() == begins_.size() + expected.size() + bytes && is_ours(head, HeadWord::message) &&
               std::memcmp(head.data() + begins_.size(), expected.data(), expected.size()) == 0;
    }

    // Whether the body of an offer fits: the header has its length, the description its type.
    bool is_offer(Head head, const ArrayHead& expected, std::size_t bytes) const {
        const std::size_t start = begins_.size(), sizes = start + sizeof(FrameHeader);
        return head.size() == start + expected.size() + sizes_bytes && is_ours(head, HeadWord::offer) &&
               std::memcmp(head.data() + start, expected.data(), sizeof(FrameHeader)) == 0 &&
               read_at<std::uint16_t>(head, sizes) == 1 && read_at<std::uint64_t>(head, sizes + 2) == bytes &&
               std::memcmp(head.data() + sizes + sizes_bytes, expected.data() + sizeof(FrameHeader),
                           expected.size() - sizeof(FrameHeader)) == 0;
    }

private:
    static constexpr std::size_t number_at = 25;    // after the word, the world and the lane
    static constexpr std::size_t sizes_bytes = 10;  // of an offer of one part: how many there are, and its length

    template <class T>
    static T read_at(Head head, std::size_t at) {
        T value;
        std::memcpy(&value, head.data() + at, sizeof value);
        return value;
    }

    static std::byte* put(std::byte* to, const void* from, std::size_t bytes) {
        std::memcpy(to, from, bytes);
        return to + bytes;
    }

    // Writes what every head of this lane begins with; returns where it goes on.
    std::byte* begin(MpiRequest& head, HeadWord word, std::uint64_t number) const {
        std::byte* const data = head.data.get();
        std::memcpy(data, begins_.data(), begins_.size());
        data[0] = static_cast<std::byte>(word);
        std::memcpy(data + number_at, &number, sizeof number);
        return data + begins_.size();
    }

    const MpiWire wire_;
    const std::string begins_;
};

}  // namespace phalanx
