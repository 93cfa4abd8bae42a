// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace logitless::train_lm {
namespace {

constexpr double kWidth = 760, kHeight = 400;
constexpr double kLeft = 52, kRight = 20, kTop = 44, kBottom = 44;

// Colours that stay apart on white and on dark grounds, and for the colour-blind.
constexpr const char* kBelow = "#f0a860";
constexpr const char* kAbove = "#1f5fa8";
constexpr const char* kText = "#444";
constexpr const char* kGrid = "#ddd";

class Axes {
 public:
  Axes(int64_t steps, double lowest, double highest)
      : steps_(steps), lowest_(std::floor(lowest * 2) / 2), highest_(std::ceil(highest * 2) / 2) {
    if (highest_ <= lowest_) highest_ = lowest_ + 1;
  }
  double x(double step) const {
    return kLeft +
           (kWidth - kLeft - kRight) * step / static_cast<double>(std::max<int64_t>(steps_, 1));
  }
  double y(double loss) const {
    return kTop + (kHeight - kTop - kBottom) * (highest_ - loss) / (highest_ - lowest_);
  }
  double lowest() const { return lowest_; }
  double highest() const { return highest_; }

 private:
  int64_t steps_;
  double lowest_, highest_;
};

std::string text(double x, double y, const char* anchor, const std::string& words,
                 const char* colour = kText) {
  return fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"{}\" fill=\"{}\">{}</text>\n",
                     x, y, anchor, colour, words);
}

std::string line(double x1, double y1, double x2, double y2, const std::string& style) {
  return fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" {}/>\n", x1, y1, x2, y2, style);
}

std::string curve(const Axes& axes, const Record& record, const std::string& style) {
  std::string points;
  for (size_t i = 0; i < record.losses.size(); ++i) {
    points += fmt::format("{}{:.1f} {:.1f}", i == 0 ? "M" : "L", axes.x(static_cast<double>(i + 1)),
                          axes.y(record.losses[i]));
  }
  return fmt::format("<path d=\"{}\" fill=\"none\" stroke-linejoin=\"round\" {}/>\n", points,
                     style);
}

std::string dots(const Axes& axes, const Record& record, double radius, const char* colour) {
  std::string all;
  for (const auto& [step, loss] : record.held_out) {
    all += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"/>\n",
                       axes.x(static_cast<double>(step)), axes.y(loss), radius, colour);
  }
  return all;
}

std::string ranks_of(const Record& record) {
  return fmt::format("{} rank{}", record.ranks, record.ranks == 1 ? "" : "s");
}

}  // namespace

std::string draw_losses(const Record& below, const Record& above) {
  double lowest = below.unigram, highest = below.unigram;
  int64_t steps = 0;
  for (const Record* record : {&below, &above}) {
    steps = std::max<int64_t>(steps, std::ssize(record->losses));
    for (const double loss : record->losses) {
      lowest = std::min(lowest, loss);
      highest = std::max(highest, loss);
    }
  }
  const Axes axes(steps, lowest, highest);
  const double right = kWidth - kRight, bottom = kHeight - kBottom;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n"
      "<title>Loss while training, {2} and {3}</title>\n"
      "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#fff\"/>\n",
      kWidth, kHeight, ranks_of(below), ranks_of(above));
  for (double loss = axes.lowest(); loss <= axes.highest(); loss += 0.5) {
    svg += line(kLeft, axes.y(loss), right, axes.y(loss), fmt::format("stroke=\"{}\"", kGrid));
    if (loss == std::floor(loss))
      svg += text(kLeft - 8, axes.y(loss) + 4, "end", fmt::format("{:.0f}", loss));
  }
  // A round distance between marks on the axis of steps: at most six of them.
  double between = 1;
  for (const double factor : {2.0, 2.5, 2.0, 2.0, 2.5, 2.0, 2.0, 2.5, 2.0, 2.0, 2.5, 2.0}) {
    if (static_cast<double>(steps) / between <= 6) break;
    between *= factor;
  }
  for (double step = 0; step <= static_cast<double>(steps); step += between) {
    svg += text(axes.x(step), bottom + 18, "middle", fmt::format("{:.0f}", step));
  }
  svg += text((kLeft + right) / 2, bottom + 36, "middle", "step");
  svg += text(kLeft - 40, kTop - 22, "start", "loss, nats per word");
  svg += line(kLeft, axes.y(below.unigram), right, axes.y(below.unigram),
              fmt::format("stroke=\"{}\" stroke-dasharray=\"6 4\"", kText));
  svg += text(right, axes.y(below.unigram) - 6, "end",
              fmt::format("frequency of words alone, held-out text: {:.2f}", below.unigram));
  svg += curve(axes, below, fmt::format("stroke=\"{}\" stroke-width=\"5\"", kBelow));
  svg += curve(axes, above, fmt::format("stroke=\"{}\" stroke-width=\"1.2\"", kAbove));
  svg += dots(axes, below, 6, kBelow);
  svg += dots(axes, above, 3, kAbove);

  // What is what, top right.
  const double x = right - 250;
  const auto entry = [&](double y, const Record& record, const char* colour, double width) {
    svg += line(x, y - 4, x + 28, y - 4,
                fmt::format("stroke=\"{}\" stroke-width=\"{}\"", colour, width));
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"/>\n", x + 48,
                       y - 4, width > 3 ? 6 : 3, colour);
    const double last =
        record.held_out.empty() ? record.losses.back() : record.held_out.back().second;
    svg +=
        text(x + 62, y, "start", fmt::format("{}, held-out text: {:.3f}", ranks_of(record), last));
  };
  entry(kTop + 22, below, kBelow, 5);
  entry(kTop + 42, above, kAbove, 1.2);
  return svg + "</svg>\n";
}

}  // namespace logitless::train_lm
