// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: the parameters of well-known models as matrices, in registration order. ResNet-50 and -152 in
// torchvision's order; BERT with a vocabulary padded to 30,528 and the decoder tied to the word embedding; the CIFAR
// models are the usual ten-class variants with batch normalisation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bucket/layout.h"

namespace cortado {

struct ModelTensor {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool is_matrix = false;  // of more than one dimension
};
using ModelShapes = std::vector<ModelTensor>;

inline void add_vector(ModelShapes* model, std::int64_t elems) { model->push_back({1, elems, false}); }

inline void add_norm(ModelShapes* model, std::int64_t channels) {
  add_vector(model, channels);
  add_vector(model, channels);
}

inline void add_linear(ModelShapes* model, std::int64_t outputs, std::int64_t inputs) {
  model->push_back({outputs, inputs, true});
  add_vector(model, outputs);
}

// A square kernel without bias, and its batch normalisation.
inline void add_conv_norm(ModelShapes* model, std::int64_t outputs, std::int64_t inputs, std::int64_t kernel) {
  model->push_back({outputs, inputs * kernel * kernel, true});
  add_norm(model, outputs);
}

// ResNet with bottleneck blocks for ImageNet.
inline ModelShapes bottleneck_resnet(const std::vector<int>& blocks_of_stage) {
  ModelShapes model;
  add_conv_norm(&model, 64, 3, 7);
  std::int64_t inputs = 64;
  std::int64_t width = 64;
  for (const int blocks : blocks_of_stage) {
    for (int block = 0; block < blocks; ++block) {
      add_conv_norm(&model, width, inputs, 1);
      add_conv_norm(&model, width, width, 3);
      add_conv_norm(&model, 4 * width, width, 1);
      if (block == 0) add_conv_norm(&model, 4 * width, inputs, 1);
      inputs = 4 * width;
    }
    width *= 2;
  }
  add_linear(&model, 1000, inputs);
  return model;
}

inline ModelShapes resnet50() { return bottleneck_resnet({3, 4, 6, 3}); }
inline ModelShapes resnet152() { return bottleneck_resnet({3, 8, 36, 3}); }

inline ModelShapes resnet18_cifar() {
  ModelShapes model;
  add_conv_norm(&model, 64, 3, 3);
  std::int64_t inputs = 64;
  for (const std::int64_t width : {64, 128, 256, 512}) {
    for (int block = 0; block < 2; ++block) {
      add_conv_norm(&model, width, inputs, 3);
      add_conv_norm(&model, width, width, 3);
      if (inputs != width) add_conv_norm(&model, width, inputs, 1);
      inputs = width;
    }
  }
  add_linear(&model, 10, inputs);
  return model;
}

inline ModelShapes vgg16_cifar() {
  ModelShapes model;
  std::int64_t inputs = 3;
  for (const std::int64_t width : {64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512}) {
    add_linear(&model, width, inputs * 3 * 3);  // a convolution with bias
    add_norm(&model, width);
    inputs = width;
  }
  add_linear(&model, 10, inputs);
  return model;
}

inline ModelShapes bert(int layers, std::int64_t hidden) {
  constexpr std::int64_t kVocabulary = 30528, kPositions = 512, kTypes = 2;
  ModelShapes model;
  for (const std::int64_t rows : {kVocabulary, kPositions, kTypes}) model.push_back({rows, hidden, true});
  add_norm(&model, hidden);
  for (int layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < 4; ++i) add_linear(&model, hidden, hidden);  // query, key, value, output
    add_norm(&model, hidden);
    add_linear(&model, 4 * hidden, hidden);
    add_linear(&model, hidden, 4 * hidden);
    add_norm(&model, hidden);
  }
  add_linear(&model, hidden, hidden);  // pooler
  add_vector(&model, kVocabulary);     // bias of the masked-word head
  add_linear(&model, hidden, hidden);
  add_norm(&model, hidden);
  add_linear(&model, 2, hidden);  // next sentence
  return model;
}

inline ModelShapes bert_base() { return bert(12, 768); }
inline ModelShapes bert_large() { return bert(24, 1024); }

// The model as the layout sees it: matrices at effective_rank, vectors dense.
inline std::vector<LayoutTensor> layout_tensors(const ModelShapes& model, int rank, double min_rate = 0) {
  std::vector<LayoutTensor> tensors;
  for (const ModelTensor& tensor : model) {
    const int r = tensor.is_matrix ? effective_rank(tensor.rows, tensor.cols, rank, min_rate) : 0;
    tensors.push_back({tensor.rows, tensor.cols, r});
  }
  return tensors;
}

}  // namespace cortado
