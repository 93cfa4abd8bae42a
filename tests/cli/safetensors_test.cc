// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using test::safetensors_bytes;
using test::Scratch;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kGood = R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})";

TEST(Safetensors, ReadsWhatItWrote) {
  const Scratch scratch;
  HostTensor matrix(DType::bf16, {3, 5});
  for (int64_t i = 0; i < 15; ++i) store_float(matrix.data(), DType::bf16, i, 0.5f * float(i));
  HostTensor bytes(DType::u8, {7});
  for (int64_t i = 0; i < 7; ++i) bytes.as<uint8_t>()[i] = static_cast<uint8_t>(200 + i);
  HostTensor ids(DType::i64, {2});
  ids.as<int64_t>()[0] = -100;
  ids.as<int64_t>()[1] = int64_t{1} << 40;
  HostTensor empty(DType::f32, {0, 4});
  const std::string path = scratch.path("x.safetensors");
  ASSERT_TRUE(write_safetensors(
                  path, {{"u8", &bytes}, {"matrix", &matrix}, {"ids", &ids}, {"empty", &empty}},
                  {{"key", "välue"}})
                  .has_value());
  EXPECT_EQ(scratch.files(), std::vector<std::string>{"x.safetensors"});

  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_EQ(file->metadata().at("key"), "välue");
  ASSERT_EQ(file->tensors().size(), 4U);
  const Result<HostTensor> read = file->read(*file->find("matrix"));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->shape(), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(std::memcmp(read->data(), matrix.data(), 30), 0);
  EXPECT_EQ(file->read(*file->find("ids"))->integer_at(1), int64_t{1} << 40);
  EXPECT_EQ(file->read(*file->find("u8"))->as<uint8_t>()[6], 206);
  EXPECT_EQ(file->read(*file->find("empty"))->elements(), 0);
  const Result<HostTensor> rows = file->read_rows(*file->find("matrix"), 2);
  ASSERT_TRUE(rows.has_value());
  EXPECT_EQ(rows->shape(), (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(rows->float_at(9), 4.5f);
}

struct HostileHeader {
  const char* name;
  std::string json;
  uint64_t data_bytes;
  const char* sentence;
};

std::string tensor(const char* dtype, const char* shape, const char* offsets) {
  return std::string(R"({"a":{"dtype":")") + dtype + R"(","shape":)" + shape +
         R"(,"data_offsets":)" + offsets + "}}";
}

std::vector<HostileHeader> hostile_headers() {
  const std::string two =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":)";
  std::string deep = R"({"a":)";
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  std::string deep_array = R"({"a":{"shape":)" + std::string(100000, '[');
  return {
      {"empty", "", 0, "not valid UTF-8 JSON"},
      {"cut", R"({"a":{"dtype":"F32")", 0, "not valid UTF-8 JSON"},
      {"trailing", std::string(kGood) + "x", 24, "not valid UTF-8 JSON"},
      {"array", "[]", 0, "the header is an array"},
      {"number", "1", 0, "the header is a number"},
      {"null", "null", 0, "the header is null"},
      {"not utf-8", "{\"\xff\xfe\":{}}", 0, "not valid UTF-8 JSON"},
      {"nul byte", std::string("{\"a\0\":{}}", 9), 0, "not valid UTF-8 JSON"},
      {"comment", "{/* */}", 0, "not valid UTF-8 JSON"},
      {"deep", deep, 0, "tensor `a`"},
      {"deep array", deep_array, 0, "shape holds an array"},
      {"tensor is a number", R"({"a":1})", 0, "`a` in the header is a number"},
      {"metadata value", R"({"__metadata__":{"k":1}})", 0, "__metadata__ `k` is a number"},
      {"metadata nested", R"({"__metadata__":{"k":{}}})", 0, "__metadata__ `k` is an object"},
      {"metadata is a string", R"({"__metadata__":"x"})", 0, "is a string; it must be an object"},
      {"no dtype", R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "tensor `a`: has no `dtype`"},
      {"no shape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "has no `shape`"},
      {"no offsets", R"({"a":{"dtype":"F32","shape":[1]}})", 4, "has no `data_offsets`"},
      {"unknown key", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4,
       "unknown key `x`"},
      {"same tensor twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "`a` comes twice"},
      {"same key twice", R"({"a":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,4]}})",
       4, "the key `dtype` comes twice"},
      {"same metadata twice", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "comes twice"},
      {"unknown dtype", tensor("F31", "[1]", "[0,4]"), 4, "unknown dtype `F31`"},
      {"dtype is a number", R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,4]}})", 4,
       "`dtype` is a number"},
      {"shape is a number", tensor("F32", "1", "[0,4]"), 4, "`shape` is a number"},
      {"negative size", tensor("F32", "[-1]", "[0,4]"), 4, "shape holds a negative number"},
      {"fractional size", tensor("F32", "[1.5]", "[0,4]"), 4, "not a 64-bit whole number"},
      {"exponent", tensor("F32", "[1e2]", "[0,400]"), 400, "not a 64-bit whole number"},
      {"size 2^64", tensor("F32", "[18446744073709551616]", "[0,4]"), 4,
       "not a 64-bit whole number"},
      {"size 2^63", tensor("F32", "[9223372036854775808]", "[0,4]"), 4, "more than 2^63 - 1"},
      {"product overflows", tensor("F32", "[4294967296,4294967296,4294967296]", "[0,4]"), 4,
       "is not a number of bytes"},
      {"product wraps to 4", tensor("F32", "[4611686018427387905]", "[0,4]"), 4,
       "is not a number of bytes"},
      {"overflow behind a 0", tensor("F32", "[0,4294967296,4294967296,4294967296]", "[0,0]"), 0,
       "is not a number of bytes"},
      {"many dimensions",
       tensor("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
              "[0,4]"),
       4, "more than 32 dimensions"},
      {"string in shape", tensor("F32", R"(["1"])", "[0,4]"), 4, "shape holds a string"},
      {"true in shape", tensor("F32", "[true]", "[0,4]"), 4, "shape holds a boolean"},
      {"one offset", tensor("F32", "[1]", "[0]"), 4, "data_offsets must be two numbers"},
      {"three offsets", tensor("F32", "[1]", "[0,4,4]"), 4, "data_offsets must be two numbers"},
      {"negative offset", tensor("F32", "[1]", "[-4,0]"), 4, "data_offsets holds a negative"},
      {"descending", tensor("F32", "[1]", "[4,0]"), 4, "must be ascending"},
      {"beyond the file", tensor("F32", "[2]", "[0,8]"), 4, "at most 4"},
      {"far beyond", tensor("U8", "[18446744073709551615]", "[0,18446744073709551615]"), 4,
       "more than 2^63 - 1"},
      {"size and offsets differ", tensor("F32", "[2]", "[0,4]"), 4,
       "takes 8 bytes, but data_offsets give 4"},
      {"half a byte", tensor("F4", "[3]", "[0,2]"), 2, "is not a number of bytes"},
      {"overlap", two + "[4,12]}}", 12, "tensors `a` and `b` overlap at byte 4"},
      {"same place", two + "[0,8]}}", 8, "overlap at byte 0"},
      {"gap", two + "[12,20]}}", 20, "bytes [8, 12) of the data, before tensor `b`"},
      {"data behind", two + "[8,16]}}", 20, "end at byte 16 of the data, but the file holds 20"},
  };
}

TEST(Safetensors, RefusesHostileHeadersInOneSentence) {
  for (const HostileHeader& hostile : hostile_headers()) {
    const Result<SafetensorsHeader> header =
        parse_safetensors_header(hostile.json, hostile.data_bytes, "f.safetensors");
    ASSERT_FALSE(header.has_value()) << hostile.name;
    EXPECT_EQ(header.error().kind, ErrorKind::invalid_data);
    EXPECT_THAT(header.error().message, StartsWith("f.safetensors: ")) << hostile.name;
    EXPECT_THAT(header.error().message, HasSubstr(hostile.sentence)) << hostile.name;
    EXPECT_THAT(header.error().message, testing::Not(HasSubstr("\n"))) << hostile.name;
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  for (const auto& [json, bytes] :
       std::vector<std::pair<std::string, uint64_t>>{{"{}", 0},
                                                     {"{}      ", 0},
                                                     {R"({"__metadata__":{}})", 0},
                                                     {kGood, 24},
                                                     {tensor("F32", "[]", "[0,4]"), 4},
                                                     {tensor("F32", "[0]", "[0,0]"), 0},
                                                     {tensor("F4", "[4]", "[0,2]"), 2},
                                                     {tensor("F8_E4M3", "[3]", "[0,3]"), 3}}) {
    const Result<SafetensorsHeader> header = parse_safetensors_header(json, bytes, "f");
    EXPECT_TRUE(header.has_value()) << json << ": " << header.error().message;
  }
}

TEST(Safetensors, NamesAreMadeSafeToPrint) {
  const Result<SafetensorsHeader> header = parse_safetensors_header(
      R"({"\u001b[2J\n":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4, "f");
  ASSERT_FALSE(header.has_value());
  EXPECT_THAT(header.error().message, HasSubstr("`\\x1b[2J\\x0a`"));
}

struct HostileFile {
  const char* name;
  std::string bytes;
  const char* sentence;
};

TEST(Safetensors, RefusesHostileFilesInOneSentence) {
  const Scratch scratch;
  const std::string whole = safetensors_bytes(kGood, 24);
  const std::vector<HostileFile> files = {
      {"empty", "", "0 bytes are too few"},
      {"seven bytes", std::string(7, '\0'), "7 bytes are too few"},
      {"length only", std::string(8, '\0'), "not valid UTF-8 JSON"},
      {"header longer than the file", whole.substr(0, 20), "but only 12 follow"},
      {"length 2^64 - 1", std::string(8, '\xff') + "{}",
       "says 18446744073709551615 bytes, but only 2 follow"},
      {"data cut", whole.substr(0, whole.size() - 1), "at most 23"},
      {"data behind", whole + "x", "but the file holds 25"},
      {"text", "this is not a safetensors file at all", "is it a safetensors file?"},
  };
  for (const HostileFile& hostile : files) {
    const std::string path = scratch.path("f.safetensors");
    test::write_file(path, hostile.bytes);
    const Result<SafetensorsFile> file = SafetensorsFile::open(path);
    ASSERT_FALSE(file.has_value()) << hostile.name;
    EXPECT_THAT(file.error().message, HasSubstr(hostile.sentence)) << hostile.name;
    EXPECT_THAT(file.error().message, HasSubstr("f.safetensors: ")) << hostile.name;
  }
}

// Every prefix and every flipped byte: an error or a file, never a crash.
TEST(Safetensors, SurvivesEveryTruncationAndFlippedByte) {
  const Scratch scratch;
  const std::string whole = safetensors_bytes(kGood, 24);
  const std::string path = scratch.path("f.safetensors");
  for (size_t size = 0; size < whole.size(); ++size) {
    test::write_file(path, whole.substr(0, size));
    EXPECT_FALSE(SafetensorsFile::open(path).has_value()) << size;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const unsigned flip : {0x01U, 0x20U, 0x80U, 0xffU}) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) ^ flip);
      test::write_file(path, bytes);
      const Result<SafetensorsFile> file = SafetensorsFile::open(path);
      if (!file) continue;
      for (const TensorInfo& info : file->tensors()) static_cast<void>(file->read(info));
    }
  }
}

// A sparse file may truly be as long as its header claims.
TEST(Safetensors, LimitsTheHeaderOfALongFile) {
  const Scratch scratch;
  const std::string path = scratch.path("sparse.safetensors");
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>((uint64_t{1} << 33) >> (8 * i));
  test::write_file(path, length);
  std::filesystem::resize_file(path, (uint64_t{1} << 33) + 8);
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  ASSERT_FALSE(file.has_value());
  EXPECT_THAT(file.error().message, HasSubstr("at most 100000000 are allowed"));
}

TEST(Safetensors, RefusesATypeItHasNoUseForOnlyWhenRead) {
  const Scratch scratch;
  const std::string path = scratch.path("f.safetensors");
  test::write_file(path, safetensors_bytes(tensor("F64", "[1]", "[0,8]"), 8));
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.has_value());
  const Result<HostTensor> read = file->read(file->tensors().front());
  ASSERT_FALSE(read.has_value());
  EXPECT_THAT(read.error().message, HasSubstr("tensor `a`: dtype F64 cannot be used"));
}

TEST(Safetensors, NoticesAFileThatShrinksAfterOpening) {
  const Scratch scratch;
  const std::string path = scratch.path("f.safetensors");
  test::write_file(path, safetensors_bytes(kGood, 24));
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.has_value());
  std::filesystem::resize_file(path, 70);
  const Result<HostTensor> read = file->read(file->tensors().front());
  ASSERT_FALSE(read.has_value());
  EXPECT_THAT(read.error().message, HasSubstr("became shorter"));
}

TEST(Safetensors, RefusesFoldersPipesAndAbsentFiles) {
  const Scratch scratch;
  EXPECT_THAT(SafetensorsFile::open(scratch.path("absent")).error().message,
              HasSubstr("cannot be opened: No such file"));
  EXPECT_THAT(SafetensorsFile::open(scratch.path("")).error().message,
              HasSubstr("is not a regular file"));
  const std::string pipe = scratch.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(SafetensorsFile::open(pipe).error().message, HasSubstr("is not a regular file"));
}

class SafetensorsWriter : public testing::Test {
 protected:
  Result<void> write(const std::string& path, const CancelToken* cancel = nullptr) {
    return write_safetensors(path, {{"a", &tensor_}}, {}, cancel);
  }
  Scratch scratch_;
  HostTensor tensor_{DType::f32, {4}};
};

TEST_F(SafetensorsWriter, LeavesTheOldFileWhenCancelled) {
  const std::string path = scratch_.path("x");
  test::write_file(path, "old");
  CancelToken cancel;
  cancel.cancel();
  const Result<void> written = write(path, &cancel);
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().kind, ErrorKind::cancelled);
  EXPECT_EQ(test::read_file(path), "old");
  EXPECT_EQ(scratch_.files(), std::vector<std::string>{"x"});
}

TEST_F(SafetensorsWriter, ReplacesAnOldFileAndWhatALinkPointsTo) {
  test::write_file(scratch_.path("real"), "old");
  std::filesystem::create_symlink(scratch_.path("real"), scratch_.path("link"));
  ASSERT_TRUE(write(scratch_.path("link")).has_value());
  EXPECT_TRUE(std::filesystem::is_symlink(scratch_.path("link")));
  EXPECT_TRUE(SafetensorsFile::open(scratch_.path("real")).has_value());
  EXPECT_EQ(scratch_.files(), (std::vector<std::string>{"link", "real"}));
}

TEST_F(SafetensorsWriter, RefusesToWriteOverAnythingButAFile) {
  EXPECT_THAT(write("/dev/null").error().message, HasSubstr("not a regular file"));
  EXPECT_THAT(write(scratch_.path("")).error().message, HasSubstr("not a regular file"));
  EXPECT_THAT(write(scratch_.path("absent/x")).error().message, HasSubstr("cannot be written"));
  EXPECT_TRUE(scratch_.files().empty());
}

TEST_F(SafetensorsWriter, LeavesNothingWhenTheDiskIsFull) {
  // The limit on file size stands in for a full disk.
  const Result<void> filled = [&] {
    HostTensor large(DType::u8, {64 << 20});
    large.fill_zero();
    struct FileSizeLimit {
      FileSizeLimit() {
        ::signal(SIGXFSZ, SIG_IGN);
        ::getrlimit(RLIMIT_FSIZE, &before);
        struct rlimit small = before;
        small.rlim_cur = 1 << 20;
        ::setrlimit(RLIMIT_FSIZE, &small);
      }
      ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before); }
      struct rlimit before {};
    } guard;
    return write_safetensors(scratch_.path("x"), {{"a", &large}}, {});
  }();
  ASSERT_FALSE(filled.has_value());
  EXPECT_THAT(filled.error().message, HasSubstr("cannot be written: File too large"));
  EXPECT_TRUE(scratch_.files().empty());
}

}  // namespace
}  // namespace logitless::cli
