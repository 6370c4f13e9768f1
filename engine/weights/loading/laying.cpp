// AWQ's codes turned round: stored one input after the other, wanted one output after the other.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LINE = 16;    // words of one line of the processor's cache
constexpr int64_t INPUTS = 128; // turned at once: of 4 bits each they are a line of every output

// Where the code of each output of a word stands in it (AWQ, arXiv 2306.00978).
constexpr int PLACES[8] = {0, 4, 1, 5, 2, 6, 3, 7};

}  // namespace

// Words [inputs, outputs / 8], `stride` apart -> codes by outputs [outputs, ceil(inputs / 2)] bytes, `apart` apart, the
// first code of a byte low.
extern "C" void firstlight_turn_awq(const uint32_t* words, int64_t inputs, int64_t count, int64_t stride,
                                    uint8_t* place, int64_t apart) {
    uint32_t even[LINE][INPUTS / 2], odd[LINE][INPUTS / 2];
    for (int64_t first = 0; first < count; first += LINE) {
        const int64_t wide = count - first < LINE ? count - first : LINE;
        for (int64_t input = 0; input < inputs; input += INPUTS) {
            const int64_t deep = inputs - input < INPUTS ? inputs - input : INPUTS;
            for (int64_t row = 0; row < deep; ++row) {
                const uint32_t* from = words + (input + row) * stride + first;
                for (int64_t word = 0; word < wide; ++word) (row % 2 ? odd : even)[word][row / 2] = from[word];
            }
            if (deep % 2)
                for (int64_t word = 0; word < wide; ++word) odd[word][deep / 2] = 0;
            const int64_t bytes = (deep + 1) / 2;
            for (int64_t word = 0; word < wide; ++word)
                for (int output = 0; output < 8; ++output) {
                    const int shift = 4 * PLACES[output];
                    uint8_t turned[INPUTS / 2];
                    for (int64_t at = 0; at < INPUTS / 2; ++at)
                        turned[at] = uint8_t(((even[word][at] >> shift) & 15) | (((odd[word][at] >> shift) & 15) << 4));
                    std::memcpy(place + ((first + word) * 8 + output) * apart + input / 2, turned, bytes);
                }
        }
    }
}
