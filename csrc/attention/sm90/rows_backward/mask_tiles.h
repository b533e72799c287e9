// The gradient of a mask by the row kernels' backward: how its tiles are cut among CTAs, as the kernel sees it.
#pragma once

#include "attention/sm90/rows_backward/rows_backward.h"
#include "plan/sm90_mask_tiles.h"

namespace attention_ext {

struct MaskTiles {
  uint32_t items;            // tiles times splits
  uint32_t splits, terms;    // of a tile
  int row_tiles, key_tiles;  // of a matrix of the gradient
  uint32_t summed_rows,
      summed_keys;            // tiles of a score matrix that are summed into one of the gradient; 1 where it has as many
  bool rows_kept, cols_kept;  // whether it has a row for each query, a column for each key
  float* parts;               // (tiles, splits, lines, kMaskTile); null: a CTA has all terms of a tile, and rounds their sum
};

// Of a call with a gradient of the mask.
MaskTilesSizes mask_tiles_sizes(const BackwardParams& params);
// It, after the records.
cudaError_t launch_mask_tiles(const RowsBackwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
