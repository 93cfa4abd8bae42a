// SPDX-License-Identifier: Apache-2.0
// Laws of the kernels, each tried on one random problem. `draw(low, high)` gives an integer of
// [low, high]; a law returns what is wrong, or nothing. Two programs draw: RapidCheck, which finds
// the smallest failure, and a loop per level that also runs where RapidCheck is not at hand.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "cpu/kernels.h"

namespace logitless::properties {

using Draw = std::function<int64_t(int64_t low, int64_t high)>;

// A panel made from rows, or from columns, holds the definition's bytes, all of them, and nothing
// beside them; sources are read to their end and no further.
std::string packing_is_its_definition(const cpu::Kernels& kernels, const Draw& draw);
// A tile holds the definition's bits: ascending k, rows as given, accumulators too.
std::string a_tile_is_its_definition(const cpu::Kernels& kernels, const Draw& draw);
// Streamed rows hold the tile's bits: tokens in the lanes, rows as they lie in memory, any depth.
std::string streamed_rows_are_their_definition(const cpu::Kernels& kernels, const Draw& draw);
// Rows of a product, straight to an output of any type: the tile's bits rounded once, also on top
// of what is there and past the caches; rows and columns beyond are left alone.
std::string product_rows_are_their_definition(const cpu::Kernels& kernels, const Draw& draw);
// A tile that packs B as it multiplies holds the tile's bits and leaves the panel of pack_cols.
std::string a_packing_tile_is_its_definition(const cpu::Kernels& kernels, const Draw& draw);
// load, store, round_values, exp, softmax: an element does not depend on its place or on how many
// there are; conversions are the scalar level's, bit by bit.
std::string an_element_does_not_know_its_place(const cpu::Kernels& kernels, const Draw& draw);
// Statistics of a segment and of merged rows: of a row, whatever rows and columns stand beside it;
// the held exponentials are those the sums are made of.
std::string statistics_belong_to_their_row(const cpu::Kernels& kernels, const Draw& draw);
// grad_logits of a row, from any source, whatever rows stand beside it: the formula in double to
// rounding, the same bits in both panels, zeros where a panel is not full, nothing beside them.
std::string grad_logits_belong_to_their_row(const cpu::Kernels& kernels, const Draw& draw);
// Both transposes move every element and touch nothing else.
std::string transposes_move_every_element(const cpu::Kernels& kernels, const Draw& draw);

struct Law {
  const char* name;
  std::string (*holds)(const cpu::Kernels&, const Draw&);
};
inline void PrintTo(const Law& law, std::ostream* out) { *out << law.name; }
inline constexpr Law kLaws[] = {
    {"PackingIsItsDefinition", packing_is_its_definition},
    {"ATileIsItsDefinition", a_tile_is_its_definition},
    {"StreamedRowsAreTheirDefinition", streamed_rows_are_their_definition},
    {"ProductRowsAreTheirDefinition", product_rows_are_their_definition},
    {"APackingTileIsItsDefinition", a_packing_tile_is_its_definition},
    {"AnElementDoesNotKnowItsPlace", an_element_does_not_know_its_place},
    {"StatisticsBelongToTheirRow", statistics_belong_to_their_row},
    {"GradLogitsBelongToTheirRow", grad_logits_belong_to_their_row},
    {"TransposesMoveEveryElement", transposes_move_every_element},
};

}  // namespace logitless::properties
