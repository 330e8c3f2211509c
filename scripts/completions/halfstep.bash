# Tab completes commands of halfstep. scripts/maintenance/make_completion.py writes this file.
_halfstep_words='runs() {
    printf "%s\n" latest
    for file in output/*/status.json; do [ -e "$file" ] && printf "%s\n" "${file%/*}"; done
}
files() {  # those that start with $1 and end with $2, and folders
    for file in "$1"*; do
        case $file in *[[:cntrl:]]*) continue ;; esac
        [ -d "$file" ] && [ ! -e "$file/status.json" ] && printf "%s/\n" "$file" && continue
        case $file in *"$2") [ -e "$file" ] && printf "%s\n" "$file" ;; esac
    done
}
flags() {  # of the command $1
    case $1 in
    models) printf "%s\n" -all -data_path -budget -output -o -out -json -dataset -cfg -image_size -batch_size -epochs -device -amp -opts ;;
    check) printf "%s\n" -cfg -opts -dataset -data_path -image_size -batch_size -batch_size_eval -num_workers -num_classes -pretrained -resume -epochs -budget -accum_iter -folds -last_epoch -seed -eval -check -check_images -amp -amp_dtype -compile -profile -device -ngpus -dist_url -world_size -rank -output -name -track ;;
    train) printf "%s\n" -cfg -opts -dataset -data_path -image_size -batch_size -batch_size_eval -num_workers -num_classes -pretrained -resume -epochs -budget -accum_iter -folds -last_epoch -seed -eval -check -check_images -amp -amp_dtype -compile -profile -device -ngpus -dist_url -world_size -rank -output -name -track ;;
    resume) printf "%s\n" -cfg -opts -dataset -data_path -image_size -batch_size -batch_size_eval -num_workers -num_classes -pretrained -resume -epochs -budget -accum_iter -folds -last_epoch -seed -eval -check -check_images -amp -amp_dtype -compile -profile -device -ngpus -dist_url -world_size -rank -output -name -track ;;
    evaluate) printf "%s\n" -cfg -opts -dataset -data_path -image_size -batch_size -batch_size_eval -num_workers -num_classes -pretrained -resume -epochs -budget -accum_iter -folds -last_epoch -seed -eval -check -check_images -amp -amp_dtype -compile -profile -device -ngpus -dist_url -world_size -rank -output -name -track ;;
    report) printf "%s\n" -output ;;
    predict) printf "%s\n" -list -top -csv -json -sheet -attention -into -unsure -unknown -raw -cfg -image_size -opts -amp -batch_size -device -ngpus -classes -flip ;;
    labels) printf "%s\n" -output -no_copies -apply -data_path -dataset -next -into -strangers -raw -cfg -image_size -opts -amp -batch_size -device -ngpus ;;
    embed) printf "%s\n" -output -o -out -examples -near -top -sheet -csv -json -into -unsure -raw -cfg -image_size -opts -amp -batch_size -device -ngpus ;;
    export) printf "%s\n" -output -o -out -to -ema -raw -calibrated -photo -int8 -keep_float -accept -data_path -runtime ;;
    compare) printf "%s\n" -metric -any_data -json ;;
    sweep) printf "%s\n" -output -o -out -over -seeds -folds -table -trial -cfg -opts -dataset -data_path -image_size -batch_size -batch_size_eval -num_workers -num_classes -pretrained -resume -epochs -budget -accum_iter -last_epoch -seed -eval -check -check_images -amp -amp_dtype -compile -profile -device -ngpus -dist_url -world_size -rank -name -track ;;
    doctor) printf "%s\n" -cfg -batch -amp_dtype ;;
    make-shards) printf "%s\n" -dataset -data_path -output -o -out -samples_per_shard -shuffle_seed -opts ;;
    from-timm|completion) ;;
    *) return ;;
    esac
    printf "%s\n" -h -version
}
values() {  # of the flag, setting or command $1. $2: the value, as far as it is typed
    case $1 in
    -resume|MODEL.RESUME) runs; printf "%s\n" auto ;;
    resume|report|doctor|compare|export) runs ;;
    -pretrained|MODEL.PRETRAINED|evaluate|predict|labels|embed) files "$2" ""; runs; printf "%s\n" weights/vit_fractals.safetensors vit_tiny_patch16_224.augreg_in21k_ft_in1k vit_small_patch32_224.augreg_in21k_ft_in1k vit_base_patch32_224.augreg_in21k_ft_in1k vit_small_patch16_224.augreg_in21k_ft_in1k vit_base_patch16_224.augreg2_in21k_ft_in1k vit_large_patch16_224.augreg_in21k_ft_in1k ;;
    -cfg) files "$2" .yaml; printf "%s\n" deit3_base_patch16_192 deit3_base_patch16_224_finetune deit3_small_patch16_224 deit_base_patch16_224 deit_small_patch16_224 deit_tiny_patch16_224 distill_features finetune finetune_batchnorm finetune_numbers finetune_numbers_batchnorm linear_probe lora resnet50_caltech256 timm vit_base_patch16_224 vit_base_patch16_384 vit_base_patch16_384_caltech101 vit_base_patch16_384_cifar10 vit_base_patch16_384_cifar100 vit_base_patch16_384_flowers102 vit_base_patch32_224 vit_base_patch32_384 vit_caltech101 vit_cifar10 vit_digits vit_fractals vit_huge_patch14_224 vit_large_patch16_224 vit_large_patch16_384 vit_large_patch32_224 vit_large_patch32_384 vit_small_patch16_224 vit_small_patch16_224_90ep vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_384 vit_tiny_patch16_224 vit_tiny_patch16_384 ;;
    -dataset|DATA.DATASET) printf "%s\n" imagenet2012 imagefolder images csv shards parquet caltech101 caltech256 cifar10 cifar100 digits torchvision/ fractals synthetic ;;
    -batch_size|DATA.BATCH_SIZE) printf "%s\n" auto ;;
    DATA.PIXELS) printf "%s\n" 8bit native window uint8 uint16 float32 ;;
    DATA.CROP_MODE) printf "%s\n" center squash border ;;
    DATA.TRAIN_CROP) printf "%s\n" rrc simple ;;
    DATA.INTERPOLATION) printf "%s\n" nearest bilinear bicubic lanczos ;;
    DATA.TRAIN_INTERPOLATION) printf "%s\n" random nearest bilinear bicubic lanczos ;;
    DATA.WORKERS) printf "%s\n" auto threads processes ;;
    DATA.DROP_LAST) printf "%s\n" true false ;;
    DATA.SAMPLER) printf "%s\n" shuffle balanced ;;
    DATA.EXIF) printf "%s\n" apply ignore ;;
    DATA.CACHE) printf "%s\n" none disk ;;
    MODEL.TYPE) printf "%s\n" vit timm ;;
    MODEL.QKV_BIAS) printf "%s\n" true false ;;
    MODEL.POS_EMBED) printf "%s\n" learn sincos2d none ;;
    MODEL.NEW_CLASSIFIER) printf "%s\n" random zeros linear ;;
    MODEL.FROZEN_STATISTICS) printf "%s\n" true false ;;
    TRAIN.LR_SCALING) printf "%s\n" linear sqrt ;;
    TRAIN.CLIP_MODE) printf "%s\n" norm value agc ;;
    TRAIN.GRAD_CHECKPOINTING) printf "%s\n" true false ;;
    TRAIN.LOSS) printf "%s\n" cross_entropy bce smooth_l1 l1 mse ;;
    TRAIN.OBJECTIVE) printf "%s\n" classes features numbers ;;
    TRAIN.FEATURES) printf "%s\n" both pooled patches ;;
    TRAIN.FEATURE_LOSS) printf "%s\n" cosine smooth_l1 ;;
    TRAIN.DISTILLATION_TYPE) printf "%s\n" none soft hard ;;
    TRAIN.MIXUP_MODE) printf "%s\n" batch pair elem ;;
    TRAIN.RANDOM_ERASE_MODE) printf "%s\n" pixel rand const ;;
    TRAIN.MODEL_EMA) printf "%s\n" true false ;;
    TRAIN.MODEL_EMA_WARMUP) printf "%s\n" true false timm ;;
    TRAIN.BEST_METRIC) printf "%s\n" top1 top5 loss macro_recall macro_f1 micro_f1 map similarity knn mae rmse r2 spearman ;;
    TRAIN.BEST_EPOCH) printf "%s\n" last highest ;;
    TRAIN.LR_SCHEDULER.NAME) printf "%s\n" cosine paddlevit constant step wsd ;;
    TRAIN.LR_SCHEDULER.PER_EPOCH) printf "%s\n" true false ;;
    TRAIN.LR_SCHEDULER.AFTER_WARMUP) printf "%s\n" true false ;;
    -amp_dtype|PRECISION.DTYPE) printf "%s\n" float16 bfloat16 auto ;;
    PRECISION.MODE) printf "%s\n" autocast naive float8 ;;
    PRECISION.RESIDUAL) printf "%s\n" auto bfloat16 float32 half ;;
    PRECISION.REDUCE) printf "%s\n" float32 half ;;
    PRECISION.MATMUL) printf "%s\n" ieee tf32 ;;
    PRECISION.USE_DYNAMIC_LOSS_SCALING) printf "%s\n" true false ;;
    DIST.STRATEGY) printf "%s\n" ddp fsdp2 ;;
    -amp|AMP) printf "%s\n" true false ;;
    -device|DEVICE) printf "%s\n" auto cuda xpu mps cpu ;;
    -compile|COMPILE) printf "%s\n" true false blocks reduce-overhead max-autotune max-autotune-no-cudagraphs ;;
    DETERMINISTIC) printf "%s\n" true false ;;
    REPORT) printf "%s\n" true false ;;
    CALIBRATE) printf "%s\n" true false ;;
    -track|TRACK) printf "%s\n" tensorboard wandb mlflow ;;
    -eval|EVAL) printf "%s\n" true false ;;
    -check|CHECK) printf "%s\n" true false ;;
    completion) printf "%s\n" bash zsh fish ;;
    esac
}
candidates() {  # $1: the last word
    case $1 in -*) flags "$command"; return ;; esac
    case $flag in
    -opts|-over)
        case $1 in
        *=*) values "${1%%=*}" "${1#*=}" | while IFS= read -r line; do printf "%s\n" "${1%%=*}=$line"; done ;;
        *) printf "%s\n" DATA.DATASET= DATA.DATA_PATH= DATA.IMAGE_ROOT= DATA.BATCH_SIZE= DATA.BATCH_SIZE_EVAL= DATA.IMAGE_SIZE= DATA.IMAGE_CHANNELS= DATA.PIXELS= DATA.RANGE= DATA.RGB= DATA.CHANNEL_FILES= DATA.CROP_PCT= DATA.CROP_MODE= DATA.CROP_SCALE= DATA.CROP_RATIO= DATA.HFLIP= DATA.VFLIP= DATA.TRAIN_CROP= DATA.INTERPOLATION= DATA.TOKENS= DATA.TRAIN_TOKENS= DATA.TRAIN_INTERPOLATION= DATA.IMAGENET_MEAN= DATA.IMAGENET_STD= DATA.NUM_WORKERS= DATA.WORKERS= DATA.DROP_LAST= DATA.SAMPLER= DATA.VAL_FRACTION= DATA.FOLD= DATA.FOLDS= DATA.LABELLED_PATH= DATA.GROUP_BY= DATA.CLASSES= DATA.LABEL_SEPARATOR= DATA.COLUMNS= DATA.TARGET_MEAN= DATA.TARGET_STD= DATA.EXIF= DATA.MAX_PIXELS= DATA.MAX_BAD_FRACTION= DATA.CACHE= DATA.CACHE_PATH= DATA.SHUFFLE_BUFFER= DATA.REMOTE_CACHE_GB= DATA.SYNTHETIC_SIZE= MODEL.TYPE= MODEL.NAME= MODEL.NUM_CLASSES= MODEL.PATCH_SIZE= MODEL.EMBED_DIM= MODEL.DEPTH= MODEL.NUM_HEADS= MODEL.MLP_RATIO= MODEL.QKV_BIAS= MODEL.POS_EMBED= MODEL.DROPOUT= MODEL.ATTENTION_DROPOUT= MODEL.DROPPATH= MODEL.PRETRAINED= MODEL.NEW_CLASSIFIER= MODEL.FROZEN_STATISTICS= MODEL.FREEZE= MODEL.KWARGS. MODEL.LORA.RANK= MODEL.LORA.ALPHA= MODEL.LORA.TARGETS= TRAIN.NUM_EPOCHS= TRAIN.BUDGET= TRAIN.SIZE_SCHEDULE= TRAIN.WARMUP_EPOCHS= TRAIN.BASE_LR= TRAIN.WARMUP_START_LR= TRAIN.END_LR= TRAIN.LINEAR_SCALED_LR= TRAIN.LR_SCALING= TRAIN.LAYER_DECAY= TRAIN.WEIGHT_DECAY= TRAIN.GRAD_CLIP= TRAIN.CLIP_MODE= TRAIN.EARLY_STOP= TRAIN.ACCUM_ITER= TRAIN.GRAD_CHECKPOINTING= TRAIN.SMOOTHING= TRAIN.LOSS= TRAIN.BCE_TARGET_THRESH= TRAIN.CLASS_WEIGHTS= TRAIN.OBJECTIVE= TRAIN.FEATURES= TRAIN.FEATURE_LOSS= TRAIN.DISTILLATION_TYPE= TRAIN.DISTILLATION_ALPHA= TRAIN.DISTILLATION_TAU= TRAIN.TEACHER_MODEL= TRAIN.TEACHER_PRETRAINED= TRAIN.COLOR_JITTER= TRAIN.AUTO_AUGMENT= TRAIN.MIXUP_ALPHA= TRAIN.CUTMIX_ALPHA= TRAIN.CUTMIX_MINMAX= TRAIN.MIXUP_PROB= TRAIN.MIXUP_SWITCH_PROB= TRAIN.MIXUP_MODE= TRAIN.MIXUP_GROUP= TRAIN.MIXUP_OFF_EPOCH= TRAIN.RANDOM_ERASE_PROB= TRAIN.RANDOM_ERASE_MODE= TRAIN.RANDOM_ERASE_COUNT= TRAIN.REPEATED_AUG= TRAIN.MODEL_EMA= TRAIN.MODEL_EMA_DECAY= TRAIN.MODEL_EMA_WARMUP= TRAIN.BEST_METRIC= TRAIN.BEST_EPOCH= TRAIN.OPTIMIZER.NAME= TRAIN.OPTIMIZER.EPS= TRAIN.OPTIMIZER.BETAS= TRAIN.OPTIMIZER.MOMENTUM= TRAIN.OPTIMIZER.KWARGS. TRAIN.LR_SCHEDULER.NAME= TRAIN.LR_SCHEDULER.PER_EPOCH= TRAIN.LR_SCHEDULER.AFTER_WARMUP= TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS= TRAIN.LR_SCHEDULER.DECAY_FRACTION= TRAIN.LR_SCHEDULER.MILESTONES= TRAIN.LR_SCHEDULER.DECAY_EPOCHS= TRAIN.LR_SCHEDULER.DECAY_RATE= PRECISION.DTYPE= PRECISION.MODE= PRECISION.RESIDUAL= PRECISION.REDUCE= PRECISION.MATMUL= PRECISION.INIT_LOSS_SCALING= PRECISION.INCR_EVERY_N_STEPS= PRECISION.INCR_RATIO= PRECISION.DECR_EVERY_N_NAN_OR_INF= PRECISION.DECR_RATIO= PRECISION.USE_DYNAMIC_LOSS_SCALING= PRECISION.MIN_LOSS_SCALING= PRECISION.MAX_LOSS_SCALING= PRECISION.MAX_CONSECUTIVE_SKIPS= PRECISION.CUSTOM_BLACK_LIST= PRECISION.CUSTOM_WHITE_LIST= DIST.TIMEOUT= DIST.STRATEGY= AMP= SEED= SAVE= SAVE_FREQ= SAVE_STEPS= KEEP_CHECKPOINTS= REPORT_FREQ= VALIDATE_FREQ= DEVICE= COMPILE= DETERMINISTIC= REPORT= CALIBRATE= TRACK= EVAL= MODEL.RESUME= NAME= CHECK= CHECK_IMAGES= PROFILE= RUN.MAX_TIME= RESUME.ALLOW_CHANGED= TRAIN.LAST_EPOCH= NGPUS= DIST.URL= DIST.WORLD_SIZE= DIST.RANK= ;;
        esac
        return ;;
    "$before") values "$flag" "$1"; return ;;
    esac
    values "$command" "$1" | grep . || flags "$command"
}
command=$1 flag=- before=
[ $# -gt 1 ] || command=
while [ $# -gt 1 ]; do
    case $1 in -*) flag=$1 ;; esac
    before=$1
    shift
done
word=$1
if [ -z "$command" ]; then printf "%s\n" models check train resume evaluate report predict labels embed export compare sweep doctor make-shards from-timm completion -h -version; else candidates "$word"; fi |
    while IFS= read -r line; do case $line in "$word"*) printf "%s\n" "$line" ;; esac; done
'
_halfstep() {
    local line current=${COMP_WORDS[COMP_CWORD]} word=${COMP_LINE:0:COMP_POINT}
    word=${word##*[[:space:]]} COMPREPLY=()
    [[ $current == [=:] ]] && current=
    [[ $word == *"$current" ]] || return  # the word has quotes
    while IFS= read -r line; do
        [[ $line == *[/=.] ]] && compopt -o nospace 2> /dev/null
        printf -v line %q "${line#"${word%"$current"}"}"  # without the part before = or :, which bash keeps
        COMPREPLY+=("$line")
    done < <(sh -c "$_halfstep_words" halfstep "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2> /dev/null)
}
complete -o default -F _halfstep halfstep
