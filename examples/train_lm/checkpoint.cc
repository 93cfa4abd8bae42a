// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "cli/failure.h"
#include "cli/ranks.h"
#include "cli/safetensors.h"
#include "cli/units.h"
#include "examples/train_lm/fingerprint.h"

namespace logitless::train_lm {
namespace {

constexpr const char* kFormat = "logitless_train_lm 2";
constexpr const char* kChecksum = "checksum";
constexpr int64_t kBlockFloats = int64_t{1} << 20;  // gathered at a time

// What the file has of a parameter: its name, and the names of AdamW's means of it.
struct Part {
  std::string name;
  std::vector<float>* values;
};
std::vector<Part> parts_of(Parameter& parameter) {
  return {{parameter.name, &parameter.value},
          {parameter.name + ".mean", &parameter.mean},
          {parameter.name + ".square", &parameter.square}};
}

cli::HostTensor as_tensor(const std::vector<float>& values, int64_t rows, int64_t cols) {
  cli::HostTensor tensor(DType::f32, {rows, cols});
  if (!values.empty()) std::memcpy(tensor.data(), values.data(), values.size() * sizeof(float));
  return tensor;
}

std::map<std::string, std::string> metadata_of(const Trainer& trainer,
                                               const std::string& fingerprint) {
  std::map<std::string, std::string> metadata = to_map(trainer.options());
  metadata["format"] = kFormat;
  metadata["text"] = fingerprint;
  return metadata;
}

// Fails unless the file has this tensor.
const cli::TensorInfo& find(const cli::SafetensorsFile& file, const std::string& name,
                            const char* dtype, const std::vector<int64_t>& shape) {
  const cli::TensorInfo* info = file.find(name);
  if (info == nullptr) {
    cli::fail(fmt::format("{}: has no tensor {}", cli::printable(file.path()), name));
  }
  // A list that is as long as there were steps.
  const bool any_length = shape.empty() && info->shape.size() == 1;
  if (info->dtype != dtype || (info->shape != shape && !any_length)) {
    cli::fail(fmt::format("{}: {} is {} [{}], must be {} [{}]", cli::printable(file.path()), name,
                          cli::printable(info->dtype), fmt::join(info->shape, ", "), dtype,
                          fmt::join(shape, ", ")));
  }
  return *info;
}

void check_metadata(const cli::SafetensorsFile& file,
                    const std::map<std::string, std::string>& wanted) {
  const auto& found = file.metadata();
  const std::string path = cli::printable(file.path());
  if (!found.contains("format") || found.at("format") != kFormat) {
    cli::fail(fmt::format("{}: is no checkpoint of this program (its metadata lack format = {})",
                          path, kFormat));
  }
  for (const auto& [key, value] : wanted) {
    const std::string was = found.contains(key) ? found.at(key) : "missing";
    if (was == value) continue;
    if (key == "text") cli::fail(fmt::format("{}: was made with another text", path));
    cli::fail(fmt::format("{}: was made with --{} {}, this run has {}", path, key,
                          cli::printable(was), value));
  }
}

// A tensor's part of the checksum: its name and shape, then its bytes.
void begin_tensor(Fingerprint& print, const std::string& name, const std::vector<int64_t>& shape) {
  print.add(name.c_str(), name.size() + 1);
  print.add(shape.data(), shape.size() * sizeof shape[0]);
}

// Of all tensors, by name; so is the other one.
std::string checksum_of(std::vector<cli::NamedTensor> tensors) {
  std::ranges::sort(tensors, {}, &cli::NamedTensor::name);
  Fingerprint print;
  for (const cli::NamedTensor& named : tensors) {
    begin_tensor(print, named.name, named.tensor->shape());
    print.add(named.tensor->data(), static_cast<size_t>(named.tensor->bytes()));
  }
  return print.str();
}

// Reads the file once, a block of rows at a time.
std::string checksum_of(const cli::SafetensorsFile& file) {
  std::vector<const cli::TensorInfo*> tensors;
  for (const cli::TensorInfo& info : file.tensors()) tensors.push_back(&info);
  std::ranges::sort(tensors, {}, &cli::TensorInfo::name);
  Fingerprint print;
  for (const cli::TensorInfo* info : tensors) {
    begin_tensor(print, info->name, info->shape);
    const int64_t rows = info->shape.empty() ? 0 : info->shape[0];
    const int64_t cols = info->shape.size() < 2 ? 1 : info->shape[1];
    const int64_t block = std::max<int64_t>(kBlockFloats / std::max<int64_t>(cols, 1), 1);
    for (int64_t first = 0; first < rows; first += block) {
      const auto part = cli::take(file.read_rows(*info, first, std::min(first + block, rows)));
      print.add(part.data(), static_cast<size_t>(part.bytes()));
    }
  }
  return print.str();
}

void check_checksum(const cli::SafetensorsFile& file) {
  const auto& metadata = file.metadata();
  const std::string stated = metadata.contains(kChecksum) ? metadata.at(kChecksum) : "missing";
  const std::string found = checksum_of(file);
  if (found == stated) return;
  cli::fail(fmt::format("{}: is damaged: the checksum of its tensors is {}, its header says {}",
                        cli::printable(file.path()), found, cli::printable(stated)));
}

}  // namespace

cli::HostTensor gather_rows(Communicator& ranks, const std::vector<RowRange>& cover,
                            std::span<const float> mine, int64_t cols) {
  const bool keeps = ranks.rank() == 0;
  int64_t V = 0, longest = 0;
  for (const RowRange& rows : cover) {
    V += rows.size();
    longest = std::max(longest, rows.size());
  }
  const int64_t block = std::clamp<int64_t>(kBlockFloats / cols, 1, std::max<int64_t>(longest, 1));
  cli::HostTensor whole;
  std::vector<float> sent, all;
  cli::on_every_rank(ranks, [&] {  // or some would wait for one that has no memory for it
    whole = cli::HostTensor(DType::f32, {keeps ? V : 0, cols});
    sent.resize(static_cast<size_t>(block * cols));
    all.resize(sent.size() * cover.size());
  });
  for (int64_t first = 0; first < longest; first += block) {
    const auto floats_of = [&](const RowRange& rows) {
      return std::clamp<int64_t>(rows.size() - first, 0, block) * cols;
    };
    std::copy_n(mine.data() + std::min<int64_t>(first * cols, std::ssize(mine)),
                floats_of(cover[static_cast<size_t>(ranks.rank())]), sent.data());
    const auto gathered =
        ranks.all_gather(std::as_bytes(std::span(sent)), std::as_writable_bytes(std::span(all)));
    if (!gathered) cli::fail(gathered.error());
    for (size_t r = 0; keeps && r < cover.size(); ++r) {
      std::copy_n(all.data() + r * sent.size(), floats_of(cover[r]),
                  whole.as<float>() + (cover[r].begin + first) * cols);
    }
  }
  return whole;
}

void save_checkpoint(const std::string& path, Communicator& ranks,
                     const std::vector<RowRange>& cover, const std::string& fingerprint,
                     Trainer& trainer) {
  Model& model = trainer.model();
  std::vector<std::pair<std::string, cli::HostTensor>> tensors;
  for (const Part& part : parts_of(model.head)) {
    tensors.emplace_back(part.name, gather_rows(ranks, cover, *part.values, model.H));
  }
  cli::on_every_rank(ranks, [&] {
    if (ranks.rank() != 0) return;
    for (Parameter* parameter : {&model.embedding, &model.hidden, &model.bias}) {
      for (const Part& part : parts_of(*parameter)) {
        tensors.emplace_back(part.name, as_tensor(*part.values, parameter->rows, parameter->cols));
      }
    }
    // Doubles, which the format has no reader for here: their bits.
    cli::HostTensor losses(DType::i64, {trainer.steps_done()});
    for (int64_t i = 0; i < trainer.steps_done(); ++i) {
      losses.as<int64_t>()[i] = std::bit_cast<int64_t>(trainer.losses()[static_cast<size_t>(i)]);
    }
    tensors.emplace_back("loss_bits", std::move(losses));
    std::vector<cli::NamedTensor> named;
    for (const auto& [name, tensor] : tensors) named.push_back({name, &tensor});
    auto metadata = metadata_of(trainer, fingerprint);
    metadata[kChecksum] = checksum_of(named);
    cli::take(cli::write_safetensors(path, named, metadata));
  });
}

void load_checkpoint(const std::string& path, Communicator& ranks, const std::string& fingerprint,
                     Trainer& trainer) {
  cli::on_every_rank(ranks, [&] {
    const auto file = cli::take(cli::SafetensorsFile::open(path));
    check_metadata(file, metadata_of(trainer, fingerprint));
    Model& model = trainer.model();
    const auto rows_of = [&](const Parameter* parameter) {
      return parameter == &model.head ? model.V : parameter->rows;
    };
    // All that can be wrong, before a number of the model changes.
    for (Parameter* parameter : model.parameters()) {
      for (const Part& part : parts_of(*parameter)) {
        find(file, part.name, "F32", {rows_of(parameter), parameter->cols});
      }
    }
    const cli::TensorInfo& loss_bits = find(file, "loss_bits", "I64", {});
    if (loss_bits.shape[0] > trainer.options().steps) {
      cli::fail(fmt::format("{}: loss_bits has {} steps, must have at most {}",
                            cli::printable(path), loss_bits.shape[0], trainer.options().steps));
    }
    check_checksum(file);
    for (Parameter* parameter : model.parameters()) {
      const int64_t rows = rows_of(parameter);
      const RowRange mine = parameter == &model.head ? model.rows : RowRange{0, rows};
      for (const Part& part : parts_of(*parameter)) {
        const auto& info = find(file, part.name, "F32", {rows, parameter->cols});
        const auto tensor = cli::take(file.read_rows(info, mine.begin, mine.end));
        std::copy_n(tensor.as<float>(), parameter->size(), part.values->data());
      }
    }
    const auto losses = cli::take(file.read(loss_bits));
    trainer.losses().clear();
    for (int64_t i = 0; i < losses.elements(); ++i) {
      trainer.losses().push_back(std::bit_cast<double>(losses.as<int64_t>()[i]));
    }
  });
}

}  // namespace logitless::train_lm
