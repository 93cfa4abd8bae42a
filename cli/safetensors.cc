// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "cli/files.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;

Error bad(const std::string& file, const std::string& rule) {
  return Error{.kind = ErrorKind::invalid_data,
               .message = fmt::format("{}: {}", printable(file), rule)};
}

struct FileType {
  const char* name;
  uint64_t bits;
  std::optional<DType> dtype;
};

// Every type the format names, so that a file may hold tensors this program never reads.
constexpr std::array<FileType, 19> kFileTypes = {{{"BOOL", 8, DType::u8},
                                                  {"U8", 8, DType::u8},
                                                  {"I8", 8, {}},
                                                  {"F8_E5M2", 8, {}},
                                                  {"F8_E4M3", 8, {}},
                                                  {"F8_E8M0", 8, {}},
                                                  {"F4", 4, {}},
                                                  {"F6_E2M3", 6, {}},
                                                  {"F6_E3M2", 6, {}},
                                                  {"I16", 16, {}},
                                                  {"U16", 16, {}},
                                                  {"F16", 16, DType::f16},
                                                  {"BF16", 16, DType::bf16},
                                                  {"I32", 32, DType::i32},
                                                  {"U32", 32, {}},
                                                  {"F32", 32, DType::f32},
                                                  {"I64", 64, DType::i64},
                                                  {"U64", 64, {}},
                                                  {"F64", 64, {}}}};

const FileType* find_type(std::string_view name) {
  const auto found =
      std::ranges::find_if(kFileTypes, [&](const FileType& type) { return name == type.name; });
  return found == kFileTypes.end() ? nullptr : &*found;
}

// Bytes of a tensor, or nothing when that (or the product of the sizes that are not 0) overflows.
std::optional<uint64_t> checked_bytes(const std::vector<int64_t>& shape, uint64_t bits) {
  uint64_t product = bits;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, static_cast<uint64_t>(size), &product)) {
      return std::nullopt;
    }
  }
  if (product > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  if (empty) return 0;
  if (product % 8 != 0) return std::nullopt;
  return product / 8;
}

// Walks the JSON as it is parsed: no document is built, nesting is refused at once, and a key that
// comes twice is seen (a document keeps only the last).
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  explicit HeaderHandler(SafetensorsHeader& header) : header_(header) {}

  const std::string& problem() const { return problem_; }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number that is not a 64-bit whole number");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::shape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return refuse(fmt::format("shape holds {}, which is more than 2^63 - 1", value));
      }
      if (tensor_.shape.size() == kMostDimensions) {
        return refuse(fmt::format("shape has more than {} dimensions", kMostDimensions));
      }
      tensor_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (where_ == Where::offsets) {
      if (offsets_ == 2) return refuse("data_offsets must be two numbers [begin, end]");
      (offsets_ == 0 ? tensor_.begin : tensor_.end) = value;
      ++offsets_;
      return true;
    }
    return unexpected("a number");
  }

  bool string(string_t& value) override {
    if (where_ == Where::metadata) {
      header_.metadata[key_] = value;
      return true;
    }
    if (where_ == Where::tensor && key_ == "dtype") {
      tensor_.dtype = value;
      return true;
    }
    return unexpected("a string");
  }

  bool start_object(std::size_t) override {
    if (where_ == Where::before) {
      where_ = Where::root;
      return true;
    }
    if (where_ != Where::root) return unexpected("an object");
    if (name_ == "__metadata__") {
      where_ = Where::metadata;
    } else {
      where_ = Where::tensor;
      tensor_ = TensorInfo{};
      tensor_.name = name_;
      offsets_ = 0;
    }
    keys_.clear();
    return true;
  }

  bool key(string_t& value) override {
    if (where_ == Where::root) {
      name_ = value;
      if (!names_.insert(value).second) {
        problem_ = fmt::format("the name `{}` comes twice in the header", printable(value));
        return false;
      }
      return true;
    }
    key_ = value;
    if (!keys_.insert(value).second) {
      return refuse(fmt::format("the key `{}` comes twice", printable(value)));
    }
    if (where_ == Where::tensor && value != "dtype" && value != "shape" &&
        value != "data_offsets") {
      return refuse(fmt::format("unknown key `{}`; a tensor has dtype, shape and data_offsets",
                                printable(value)));
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::root) {
      where_ = Where::after;
      return true;
    }
    if (where_ == Where::tensor) {
      for (const char* needed : {"dtype", "shape", "data_offsets"}) {
        if (!keys_.contains(needed)) return refuse(fmt::format("has no `{}`", needed));
      }
      header_.tensors.push_back(std::move(tensor_));
    }
    where_ = Where::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (where_ == Where::tensor && key_ == "shape") {
      where_ = Where::shape;
      return true;
    }
    if (where_ == Where::tensor && key_ == "data_offsets") {
      where_ = Where::offsets;
      return true;
    }
    return unexpected("an array");
  }

  bool end_array() override {
    if (where_ == Where::offsets && offsets_ != 2) {
      return refuse("data_offsets must be two numbers [begin, end]");
    }
    where_ = Where::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    problem_ = fmt::format("the header is not valid UTF-8 JSON (at its byte {})", position);
    return false;
  }

 private:
  enum class Where { before, root, metadata, tensor, shape, offsets, after };
  static constexpr size_t kMostDimensions = 32;

  bool refuse(const std::string& rule) {
    problem_ = where_ == Where::before || where_ == Where::root
                   ? fmt::format("header: {}", rule)
                   : fmt::format("tensor `{}`: {}", printable(name_), rule);
    return false;
  }

  bool unexpected(const char* what) {
    switch (where_) {
      case Where::before:
      case Where::after:
        problem_ = fmt::format("the header is {}; it must be a JSON object of tensors", what);
        return false;
      case Where::root:
        problem_ =
            fmt::format("`{}` in the header is {}; it must be an object", printable(name_), what);
        return false;
      case Where::metadata:
        problem_ =
            fmt::format("__metadata__ `{}` is {}; it must be a string", printable(key_), what);
        return false;
      case Where::tensor:
        return refuse(fmt::format("`{}` is {}", printable(key_), what));
      case Where::shape:
        return refuse(fmt::format("shape holds {}; only whole numbers >= 0 are allowed", what));
      case Where::offsets:
        return refuse(
            fmt::format("data_offsets holds {}; only whole numbers >= 0 are allowed", what));
    }
    return false;
  }

  SafetensorsHeader& header_;
  std::string problem_;
  Where where_ = Where::before;
  std::string name_;             // the key in the root object
  std::string key_;              // the key in the object inside it
  std::set<std::string> names_;  // of the root object
  std::set<std::string> keys_;   // of the object inside it
  TensorInfo tensor_;
  int offsets_ = 0;
};

// The rules that tie shapes and offsets to the file.
Result<void> check_layout(SafetensorsHeader& header, uint64_t data_bytes, const std::string& file) {
  for (const TensorInfo& tensor : header.tensors) {
    const auto refuse = [&](const std::string& rule) {
      return bad(file, fmt::format("tensor `{}`: {}", printable(tensor.name), rule));
    };
    const FileType* type = find_type(tensor.dtype);
    if (type == nullptr) return refuse(fmt::format("unknown dtype `{}`", printable(tensor.dtype)));
    if (tensor.begin > tensor.end || tensor.end > data_bytes) {
      return refuse(fmt::format(
          "data_offsets [{}, {}] must be ascending and at most {}, the bytes of data in "
          "the file",
          tensor.begin, tensor.end, data_bytes));
    }
    const std::optional<uint64_t> bytes = checked_bytes(tensor.shape, type->bits);
    if (!bytes) {
      return refuse(fmt::format("shape [{}] of {} is not a number of bytes below 2^60",
                                fmt::join(tensor.shape, ", "), tensor.dtype));
    }
    if (*bytes != tensor.end - tensor.begin) {
      return refuse(fmt::format("shape [{}] of {} takes {} bytes, but data_offsets give {}",
                                fmt::join(tensor.shape, ", "), tensor.dtype, *bytes,
                                tensor.end - tensor.begin));
    }
  }
  std::ranges::sort(header.tensors, [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t covered = 0;
  const std::string* before = nullptr;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.begin < covered) {
      return bad(file, fmt::format("tensors `{}` and `{}` overlap at byte {} of the data",
                                   printable(*before), printable(tensor.name), tensor.begin));
    }
    if (tensor.begin > covered) {
      return bad(file, fmt::format("bytes [{}, {}) of the data, before tensor `{}`, belong to no "
                                   "tensor",
                                   covered, tensor.begin, printable(tensor.name)));
    }
    covered = tensor.end;
    before = &tensor.name;
  }
  if (covered != data_bytes) {
    return bad(file, fmt::format("the tensors end at byte {} of the data, but the file holds {}",
                                 covered, data_bytes));
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::string_view text, uint64_t data_bytes,
                                                   const std::string& file) {
  SafetensorsHeader header;
  HeaderHandler handler(header);
  if (!json::sax_parse(text.begin(), text.end(), &handler)) return bad(file, handler.problem());
  const Result<void> layout = check_layout(header, data_bytes, file);
  if (!layout) return layout.error();
  return header;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const Result<InputFile> file = InputFile::open(path);
  if (!file) return file.error();
  if (file->size() < kLengthBytes) {
    return bad(path, fmt::format("{} bytes are too few for a safetensors file, which starts with 8 "
                                 "bytes of header length",
                                 file->size()));
  }
  std::array<unsigned char, kLengthBytes> length_bytes{};
  const Result<void> length_read = file->read(0, length_bytes.data(), kLengthBytes);
  if (!length_read) return length_read.error();
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{length_bytes[i]} << (8 * i);
  if (length > file->size() - kLengthBytes) {
    return bad(path, fmt::format("the header's length says {} bytes, but only {} follow; is it a "
                                 "safetensors file?",
                                 length, file->size() - kLengthBytes));
  }
  if (length > kMaxHeaderBytes) {
    return bad(path, fmt::format("the header's length says {} bytes; at most {} are allowed",
                                 length, kMaxHeaderBytes));
  }
  std::string text(length, '\0');
  const Result<void> text_read = file->read(kLengthBytes, text.data(), length);
  if (!text_read) return text_read.error();
  Result<SafetensorsHeader> header =
      parse_safetensors_header(text, file->size() - kLengthBytes - length, path);
  if (!header) return header.error();
  SafetensorsFile opened;
  opened.path_ = path;
  opened.header_ = std::move(header).value();
  opened.data_offset_ = kLengthBytes + length;
  return opened;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find_if(
      header_.tensors, [&](const TensorInfo& tensor) { return tensor.name == name; });
  return found == header_.tensors.end() ? nullptr : &*found;
}

Result<HostTensor> SafetensorsFile::read(const TensorInfo& info) const {
  return read_rows(info, info.shape.empty() ? 1 : info.shape[0]);
}

Result<HostTensor> SafetensorsFile::read_rows(const TensorInfo& info, int64_t rows) const {
  return read_rows(info, 0, rows);
}

Result<HostTensor> SafetensorsFile::read_rows(const TensorInfo& info, int64_t begin,
                                              int64_t end) const {
  const std::optional<DType> dtype = dtype_from_safetensors(info.dtype);
  if (!dtype) {
    return bad(path_,
               fmt::format("tensor `{}`: dtype {} cannot be used; allowed are F32, F16, BF16, "
                           "I32, I64, U8 and BOOL",
                           printable(info.name), info.dtype));
  }
  const Result<InputFile> file = InputFile::open(path_);
  if (!file) return file.error();
  // The file may have been replaced since open(): ask for no more memory than it holds now.
  if (file->size() < data_offset_ || info.end > file->size() - data_offset_) {
    return bad(path_, "became shorter while it was read");
  }
  std::vector<int64_t> shape = info.shape;
  if (!shape.empty()) shape[0] = end - begin;
  HostTensor tensor(*dtype, std::move(shape));
  const auto row_bytes =
      begin == 0 ? 0 : (info.end - info.begin) / static_cast<uint64_t>(info.shape[0]);
  const Result<void> data_read =
      file->read(data_offset_ + info.begin + static_cast<uint64_t>(begin) * row_bytes,
                 tensor.data(), static_cast<uint64_t>(tensor.bytes()));
  if (!data_read) return data_read.error();
  return tensor;
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  const FileType* type = find_type(name);
  return type == nullptr ? std::nullopt : type->dtype;
}

const char* dtype_to_safetensors(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "F32";
    case DType::f16:
      return "F16";
    case DType::bf16:
      return "BF16";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
    case DType::u8:
      return "U8";
  }
  return "?";
}

Result<void> write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                               const std::map<std::string, std::string>& metadata,
                               const CancelToken* cancel) {
  // Wider elements first, as the format's own library does: every tensor is then aligned.
  std::vector<NamedTensor> ordered = tensors;
  std::ranges::stable_sort(ordered, [](const NamedTensor& a, const NamedTensor& b) {
    return size_of(a.tensor->dtype()) > size_of(b.tensor->dtype());
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const NamedTensor& named : ordered) {
    const int64_t end = offset + named.tensor->bytes();
    header[named.name] = {{"dtype", dtype_to_safetensors(named.tensor->dtype())},
                          {"shape", named.tensor->shape()},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::array<unsigned char, kLengthBytes> length{};
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  }

  Result<OutputFile> file = OutputFile::create(path);
  if (!file) return file.error();
  Result<void> written = file->write(length.data(), length.size(), cancel);
  if (written) written = file->write(text.data(), text.size(), cancel);
  for (const NamedTensor& named : ordered) {
    if (!written) break;
    written =
        file->write(named.tensor->data(), static_cast<uint64_t>(named.tensor->bytes()), cancel);
  }
  if (!written) return written.error();
  return file->commit();
}

}  // namespace logitless::cli
