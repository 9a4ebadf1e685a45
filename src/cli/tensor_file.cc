// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/tensor_file.h"

#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

namespace cortado::cli {

namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";

// ---- the dictionary of an .npy header ------------------------------------------------------------------------------

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

// Reads the Python literal that NumPy writes: strings, True and False, tuples of integers. Nothing else occurs in
// headers of plain arrays; reading stops at the first thing that is not expected.
class DictionaryReader {
 public:
  explicit DictionaryReader(std::string_view text) : text_(text) {}

  std::optional<NpyHeader> read() {
    NpyHeader header;
    int seen = 0;
    if (!take('{')) return std::nullopt;
    while (!take('}')) {
      const std::optional<std::string> key = string();
      if (!key.has_value() || !take(':') || !value(*key, &header)) return std::nullopt;
      seen |= *key == "descr" ? 1 : *key == "fortran_order" ? 2 : 4;
      if (!take(',') && !next_is('}')) return std::nullopt;
    }
    return seen == 7 ? std::optional(header) : std::nullopt;
  }

 private:
  bool value(const std::string& key, NpyHeader* header) {
    if (key == "descr") {
      const std::optional<std::string> text = string();
      header->descr = text.value_or("");
      return text.has_value();
    }
    if (key == "fortran_order") {
      header->fortran_order = word("True");
      return header->fortran_order || word("False");
    }
    return key == "shape" && tuple(&header->shape);
  }

  bool tuple(std::vector<std::int64_t>* numbers) {
    if (!take('(')) return false;
    while (!take(')')) {
      skip_blanks();
      std::int64_t number = 0;
      const char* end = text_.data() + text_.size();
      const auto [next, error] = std::from_chars(text_.data(), end, number);
      if (error != std::errc() || number < 0) return false;
      text_.remove_prefix(static_cast<std::size_t>(next - text_.data()));
      numbers->push_back(number);
      if (!take(',') && !next_is(')')) return false;
    }
    return true;
  }

  std::optional<std::string> string() {
    const char quote = next_is('"') ? '"' : '\'';
    if (!take(quote)) return std::nullopt;
    const std::size_t end = text_.find(quote);
    if (end == std::string_view::npos) return std::nullopt;
    std::string result(text_.substr(0, end));
    text_.remove_prefix(end + 1);
    return result;
  }

  void skip_blanks() { text_.remove_prefix(std::min(text_.find_first_not_of(" \n"), text_.size())); }

  bool word(std::string_view expected) {
    skip_blanks();
    if (!text_.starts_with(expected)) return false;
    text_.remove_prefix(expected.size());
    return true;
  }
  bool take(char c) { return word(std::string_view(&c, 1)); }
  bool next_is(char c) {
    skip_blanks();
    return text_.starts_with(c);
  }

  std::string_view text_;
};

Status unsupported(const std::string& text) { return {StatusCode::kUnsupported, text}; }

Result<DType> dtype_of(const std::string& descr, const InputOptions& options) {
  const bool one_byte = descr.ends_with("u1");
  const std::string_view kind = std::string_view(descr).substr(descr.empty() ? 0 : 1);
  if (descr.starts_with('>') && !one_byte) {
    return unsupported(
        ".npy of dtype \"" + descr +
        "\", which is big-endian; convert it first: np.save(\"OUT.npy\", np.load(\"IN.npy\").astype(\"<" +
        std::string(kind) + "\"))");
  }
  if (kind == "f4") return DType::kFloat32;
  if (kind == "f2") return DType::kFloat16;
  if (one_byte) return DType::kUint8;
  if (kind == "V2") {
    if (options.dtype == DType::kBFloat16) return DType::kBFloat16;
    return unsupported(".npy of dtype \"" + descr + "\"; if these are bfloat16 values, say --dtype bf16");
  }
  return unsupported(".npy of dtype \"" + descr +
                     "\"; codecs take float32, float16, bfloat16 and uint8. Convert it first: "
                     "np.save(\"OUT.npy\", np.load(\"IN.npy\").astype(\"float32\"))");
}

Status damaged_npy(const std::string& text) { return {StatusCode::kCorruptData, ".npy: " + text}; }

// Elements of a shape in bytes; nothing if no file can have as many.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, DType dtype) {
  std::uint64_t bytes = dtype_bytes(dtype);
  for (const std::int64_t size : shape) {
    if (size == 0) return 0;
  }
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > INT64_MAX) {
      return std::nullopt;
    }
  }
  return bytes;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (const std::int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + (shape.size() == 1 ? ",)" : ")");
}

Result<TensorFile> read_npy(std::span<const std::byte> file, const InputOptions& options) {
  if (file.size() < 10) return damaged_npy("cut short: " + std::to_string(file.size()) + " bytes, expected 10 or more");
  const auto major = static_cast<int>(file[6]);
  if (major != 1 && major != 2) {
    return unsupported(".npy of format " + std::to_string(major) + "." + std::to_string(static_cast<int>(file[7])) +
                       "; this program reads 1.0 and 2.0, which NumPy writes for plain arrays");
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  std::uint32_t header_bytes = 0;
  const std::size_t begin = 8 + length_bytes;
  if (file.size() >= begin) std::memcpy(&header_bytes, file.data() + 8, length_bytes);
  if (file.size() < begin + header_bytes) {
    return damaged_npy("header cut short: " + std::to_string(file.size()) + " bytes, expected " +
                       std::to_string(begin + header_bytes) + " or more");
  }
  const auto* text = reinterpret_cast<const char*>(file.data() + begin);
  const std::optional<NpyHeader> header = DictionaryReader({text, header_bytes}).read();
  if (!header.has_value()) {
    return unsupported(".npy whose header is not that of a plain array: " +
                       std::string(text, std::min<std::size_t>(header_bytes, 80)));
  }
  Result<DType> dtype = dtype_of(header->descr, options);
  if (!dtype.ok()) return dtype.status();
  if (options.dtype.has_value() && *options.dtype != dtype.value()) {
    return Status(StatusCode::kInvalidArgument, "--dtype " + std::string(dtype_name(*options.dtype)) +
                                                    ", but the .npy holds " + std::string(dtype_name(dtype.value())) +
                                                    "; leave --dtype out");
  }
  if (!options.shape.empty()) {
    return Status(StatusCode::kInvalidArgument, "--shape, but the .npy has the shape " + shape_text(header->shape) +
                                                    " of its own; leave --shape out");
  }
  if (header->fortran_order) {
    return unsupported(
        ".npy in Fortran order; rewrite it first: "
        "np.save(\"OUT.npy\", np.ascontiguousarray(np.load(\"IN.npy\")))");
  }
  const std::span<const std::byte> data = file.subspan(begin + header_bytes);
  const std::optional<std::uint64_t> expected = bytes_of(header->shape, dtype.value());
  if (expected != data.size()) {
    return damaged_npy(std::to_string(data.size()) + " bytes of data, expected " +
                       (expected.has_value() ? std::to_string(*expected) : "more than there can be") + " for " +
                       shape_text(header->shape) + " " + std::string(dtype_name(dtype.value())));
  }
  return TensorFile{.dtype = dtype.value(), .source = FileSource::kNpy, .shape = header->shape, .data = data};
}

Result<TensorFile> read_raw(std::span<const std::byte> file, const InputOptions& options) {
  if (!options.dtype.has_value()) {
    return Status(StatusCode::kInvalidArgument,
                  "no .npy file; if it holds raw values, say which: --dtype fp32, fp16, bf16 or uint8");
  }
  const DType dtype = *options.dtype;
  const std::size_t elem_bytes = dtype_bytes(dtype);
  if (file.size() % elem_bytes != 0) {
    return Status(StatusCode::kInvalidArgument, std::to_string(file.size()) + " bytes are no whole number of " +
                                                    std::string(dtype_name(dtype)) + " values of " +
                                                    std::to_string(elem_bytes) + " bytes");
  }
  TensorFile tensor{.dtype = dtype, .source = FileSource::kRaw, .shape = options.shape, .data = file};
  if (tensor.shape.empty()) tensor.shape = {static_cast<std::int64_t>(file.size() / elem_bytes)};
  if (bytes_of(tensor.shape, dtype) != file.size()) {
    return Status(StatusCode::kInvalidArgument,
                  "it has " + std::to_string(file.size() / elem_bytes) + " " + std::string(dtype_name(dtype)) +
                      " values, which do not fill the --shape " + shape_text(tensor.shape));
  }
  return tensor;
}

}  // namespace

ConstTensorView TensorFile::matrix() const {
  const auto elems = static_cast<std::int64_t>(data.size() / dtype_bytes(dtype));
  const std::int64_t rows = elems == 0 ? 0 : shape.size() > 1 ? shape.front() : 1;
  return {data.data(), dtype, rows, rows == 0 ? 0 : elems / rows};
}

Result<TensorFile> read_tensor_file(std::span<const std::byte> file, const InputOptions& options) {
  const bool is_npy =
      file.size() >= kNpyMagic.size() && std::memcmp(file.data(), kNpyMagic.data(), kNpyMagic.size()) == 0;
  return is_npy ? read_npy(file, options) : read_raw(file, options);
}

std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape) {
  constexpr const char* kDescr[] = {"<f4", "<f2", "|V2", "|u1"};
  std::string text = std::string("{'descr': '") + kDescr[static_cast<int>(dtype)] +
                     "', 'fortran_order': False, 'shape': " + shape_text(shape) + ", }";
  // NumPy leaves room for the first dimension to grow in place.
  constexpr std::size_t kDigits = 21, kAlignment = 64, kPrefixBytes = 10;
  if (!shape.empty()) text.append(kDigits - std::to_string(shape.front()).size(), ' ');
  const std::size_t unpadded = kPrefixBytes + text.size() + 1;
  text.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  text += '\n';
  const auto length = static_cast<std::uint16_t>(text.size());  // at most 32 dimensions
  std::string header(kNpyMagic);
  header += {'\1', '\0', static_cast<char>(length & 0xff), static_cast<char>(length >> 8)};
  return header + text;
}

}  // namespace cortado::cli
