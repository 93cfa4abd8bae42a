// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cli/safetensors.h"
#include "tests/cli/scratch.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

using test::bits_of;
using test::small_cover;
using test::small_options;
using test::small_text;
using test::with_trainers;
using testing::AllOf;
using testing::HasSubstr;

void run_steps(Trainer& trainer, int64_t until) {
  const CancelToken never;
  while (trainer.steps_done() < until) ASSERT_TRUE(trainer.step(never));
}

TEST(Checkpoint, AResumedRunHasTheSameBits) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.safetensors");
  const Text text = small_text();
  const std::string print = text.fingerprint();
  Options sparse = small_options();
  sparse.grad_tolerance = 0.5;
  for (const auto& [ranks, options] :
       {std::pair(1, small_options()), {4, small_options()}, {1, sparse}, {3, sparse}}) {
    const auto cover = small_cover(text.V(), ranks);
    std::vector<std::vector<uint32_t>> whole(4), resumed(4);
    with_trainers(ranks, options, text, [&](Communicator& communicator, Trainer& trainer) {
      run_steps(trainer, 3);
      save_checkpoint(path, communicator, cover, print, trainer);
      run_steps(trainer, 8);
      whole[static_cast<size_t>(communicator.rank())] = bits_of(trainer);
    });
    with_trainers(ranks, options, text, [&](Communicator& communicator, Trainer& trainer) {
      load_checkpoint(path, communicator, print, trainer);
      EXPECT_EQ(trainer.steps_done(), 3);
      run_steps(trainer, 8);
      resumed[static_cast<size_t>(communicator.rank())] = bits_of(trainer);
    });
    EXPECT_EQ(resumed, whole) << ranks;
    EXPECT_EQ(scratch.files().size(), 1u);
  }
}

TEST(Checkpoint, OtherRanksMayGoOn) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.safetensors"),
                    again = scratch.path("again.safetensors");
  const Text text = small_text();
  const std::string print = text.fingerprint();
  with_trainers(4, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
    run_steps(trainer, 2);
    save_checkpoint(path, communicator, small_cover(text.V(), 4), print, trainer);
  });
  with_trainers(3, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
    load_checkpoint(path, communicator, print, trainer);
    save_checkpoint(again, communicator, small_cover(text.V(), 3), print, trainer);
  });
  EXPECT_EQ(cli::test::read_file(again), cli::test::read_file(path));
}

TEST(Checkpoint, WhatIsWrongWithAFileIsNamed) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.safetensors");
  const Text text = small_text();
  const std::string print = text.fingerprint();
  const std::vector<RowRange> cover = small_cover(text.V(), 1);
  with_trainers(1, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
    run_steps(trainer, 1);
    save_checkpoint(path, communicator, cover, print, trainer);
    EXPECT_THAT(test::message_of([&] {
                  save_checkpoint(scratch.path("no/folder"), communicator, cover, print, trainer);
                }),
                HasSubstr("no/folder: cannot be written"));
    const auto complaint = [&](const std::string& file, const std::string& fingerprint) {
      return test::message_of([&] { load_checkpoint(file, communicator, fingerprint, trainer); });
    };
    EXPECT_EQ(complaint(path, print), "");
    EXPECT_THAT(complaint(scratch.path("none"), print),
                AllOf(HasSubstr("none"), HasSubstr("cannot be opened")));
    EXPECT_THAT(complaint(path, "0"), HasSubstr("run.safetensors: was made with another text"));

    // Cut short, and with another length in its header.
    const std::string bytes = cli::test::read_file(path);
    const std::string broken = scratch.path("broken");
    cli::test::write_file(broken, bytes.substr(0, bytes.size() / 2));
    EXPECT_THAT(complaint(broken, print), HasSubstr("broken"));
    cli::test::write_file(broken, "hello");
    EXPECT_THAT(complaint(broken, print), HasSubstr("broken"));
    std::string renamed = bytes;
    renamed.replace(renamed.find("\"bias.mean\""), 11, "\"bias.mine\"");
    cli::test::write_file(broken, renamed);
    EXPECT_THAT(complaint(broken, print), HasSubstr("broken: has no tensor bias.mean"));

    cli::HostTensor other(DType::f32, {2, 2});
    other.fill_zero();
    ASSERT_TRUE(cli::write_safetensors(broken, {{"x", &other}}, {}));
    EXPECT_THAT(complaint(broken, print), HasSubstr("broken: is no checkpoint of this program"));
    auto metadata = to_map(small_options());
    metadata["format"] = "logitless_train_lm 2";
    metadata["text"] = print;
    ASSERT_TRUE(cli::write_safetensors(broken, {{"embedding", &other}}, metadata));
    EXPECT_THAT(complaint(broken, print),
                HasSubstr("broken: embedding is F32 [2, 2], must be F32 [151, 12]"));
  });
  Options options = small_options();
  options.hidden = 41;
  with_trainers(1, options, text, [&](Communicator& communicator, Trainer& trainer) {
    EXPECT_THAT(test::message_of([&] { load_checkpoint(path, communicator, print, trainer); }),
                HasSubstr("run.safetensors: was made with --hidden 40, this run has 41"));
  });
}

TEST(Checkpoint, ADamagedFileIsRefusedAndTheModelLeftAlone) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.safetensors"), damaged = scratch.path("damaged");
  const Text text = small_text();
  const std::string print = text.fingerprint();
  with_trainers(3, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
    run_steps(trainer, 2);
    save_checkpoint(path, communicator, small_cover(text.V(), 3), print, trainer);
  });
  const std::string bytes = cli::test::read_file(path);
  uint64_t header_bytes = 0;  // little endian, as this machine is
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const size_t data = sizeof header_bytes + static_cast<size_t>(header_bytes);
  ASSERT_LT(data, bytes.size());
  with_trainers(1, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
    const auto before = bits_of(trainer);
    const auto complaint = [&](const std::string& contents) {
      cli::test::write_file(damaged, contents);
      const std::string message =
          test::message_of([&] { load_checkpoint(damaged, communicator, print, trainer); });
      EXPECT_EQ(bits_of(trainer), before);
      return message;
    };
    // In every tensor, first and last byte of the data among them.
    for (size_t i = 0; i < 64; ++i) {
      std::string other = bytes;
      const size_t at = data + i * (bytes.size() - data - 1) / 63;
      other[at] = static_cast<char>(other[at] ^ (1 << (i % 8)));
      EXPECT_THAT(complaint(other),
                  HasSubstr("damaged: is damaged: the checksum of its tensors is "))
          << at;
    }
    std::string other = bytes;
    const size_t sum = other.find("\"checksum\":\"") + 12;
    other[sum] = other[sum] == '0' ? '1' : '0';
    EXPECT_THAT(complaint(other),
                HasSubstr("damaged: is damaged: the checksum of its tensors is "));
    for (const size_t size :
         {bytes.size() - 1, bytes.size() / 2, data, data / 2, size_t{8}, size_t{0}}) {
      EXPECT_THAT(complaint(bytes.substr(0, size)), HasSubstr("damaged: ")) << size;
    }
    load_checkpoint(path, communicator, print, trainer);
    EXPECT_NE(bits_of(trainer), before);
  });
}

}  // namespace
}  // namespace logitless::train_lm
