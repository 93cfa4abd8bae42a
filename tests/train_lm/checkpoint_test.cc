// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
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
  for (const int ranks : {1, 4}) {
    const auto cover = small_cover(text.V(), ranks);
    std::vector<std::vector<uint32_t>> whole(4), resumed(4);
    with_trainers(ranks, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
      run_steps(trainer, 3);
      save_checkpoint(path, communicator, cover, print, trainer);
      run_steps(trainer, 8);
      whole[static_cast<size_t>(communicator.rank())] = bits_of(trainer);
    });
    with_trainers(ranks, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
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
    metadata["format"] = "logitless_train_lm 1";
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

}  // namespace
}  // namespace logitless::train_lm
